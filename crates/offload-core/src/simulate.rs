//! How long a step takes: the shipping schedule, driven by a clock instead of a device.
//!
//! ```text
//!   copy stream     copy 0 | copy 1 |   wait last use 0 → copy 2 | …        each copy: latency + bytes / rate
//!   compute stream         | wait copied 0 → compute 0 | compute 1 | …      each visit: its seconds
//! ```
//!
//! The schedule decides what is copied when; this file only adds up times, so that what is predicted here is what the
//! engine does. The host takes no time, and a copy is never earlier than the visit at which it was issued.
#![forbid(unsafe_code)]

use crate::model::UnitId;
use crate::plan::{Plan, PlanError};
use crate::schedule::{Command, Schedule};

/// Seconds from the event a copy waits for to its first byte. Back-to-back copies of 200 KiB and 2 MiB lose about
/// 3 µs each over `PCIe` 5 x16, single ones of 1 MiB 15 µs; streamed ones lie between.
pub const COPY_LATENCY: f64 = 10e-6;

/// What a step is simulated with.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    /// The seconds of compute of each visit of the plan's order.
    pub compute: Vec<f64>,
    /// The rate of copies.
    pub link_bytes_per_second: f64,
    /// Seconds each copy takes beyond its bytes; [`COPY_LATENCY`] is what was measured.
    pub copy_latency: f64,
}

/// Compute that had to wait for a copy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stall {
    /// The place of the visit in the order.
    pub visit: usize,
    /// The unit visited.
    pub unit: UnitId,
    /// How long its compute waited.
    pub seconds: f64,
}

/// A step in the steady state.
#[derive(Debug, Clone, PartialEq)]
pub struct Simulation {
    /// From the end of one step to the end of the next.
    pub step_seconds: f64,
    /// The compute of a step.
    pub compute_seconds: f64,
    /// How long the link was copying in a step, latencies included.
    pub link_seconds: f64,
    /// The bytes copied in a step.
    pub copied_bytes: u64,
    /// Where compute waited in the last step simulated, in visit order.
    pub stalls: Vec<Stall>,
}

/// Steps are simulated until two in a row take the same time, and at most this many.
const MAX_STEPS: usize = 16;

/// Times a plan's step in the steady state.
///
/// # Errors
/// Compute times that do not match the order, a rate that is none, or a plan whose order the schedule refuses.
pub fn simulate(plan: &Plan, workload: &Workload) -> Result<Simulation, PlanError> {
    let visits = plan.order.len();
    let valid = |seconds: &f64| seconds.is_finite() && *seconds >= 0.0;
    if workload.compute.len() != visits || !workload.compute.iter().chain([&workload.copy_latency]).all(valid)
    {
        return Err(PlanError::BadComputeTimes { given: workload.compute.len(), visits });
    }
    let rate = workload.link_bytes_per_second;
    if !(rate.is_finite() && rate > 0.0) {
        return Err(PlanError::BadLinkRate { bytes_per_second: rate.to_string() });
    }
    let mut clock = Clock::new(plan, workload);
    let mut schedule = Schedule::for_plan(plan)?;
    let mut commands = Vec::new();
    let mut last_step = f64::NAN;
    for step in 0..MAX_STEPS {
        let began = clock.begin_step();
        schedule.begin_step(&mut commands);
        clock.execute(&mut commands, 0);
        for (visit, (&unit, &seconds)) in plan.order.iter().zip(&workload.compute).enumerate() {
            schedule.enter(unit, &mut commands)?;
            clock.execute(&mut commands, visit);
            clock.compute += seconds;
            schedule.leave(unit, &mut commands)?;
            clock.execute(&mut commands, visit);
        }
        schedule.end_step(&mut commands);
        clock.execute(&mut commands, visits);
        let took = clock.compute - began;
        let steady = step > 0 && (took - last_step).abs() <= 1e-9 * took;
        last_step = took;
        if steady {
            break;
        }
    }
    Ok(Simulation {
        step_seconds: last_step,
        compute_seconds: workload.compute.iter().sum(),
        link_seconds: clock.busy,
        copied_bytes: clock.copied,
        stalls: clock.stalls,
    })
}

/// The two streams, each as the time up to which it is busy, and the events recorded on them.
struct Clock<'a> {
    plan: &'a Plan,
    workload: &'a Workload,
    copies: f64,
    compute: f64,
    copied_at: Vec<f64>,
    last_use_at: Vec<f64>,
    busy: f64,
    copied: u64,
    stalls: Vec<Stall>,
}

impl<'a> Clock<'a> {
    fn new(plan: &'a Plan, workload: &'a Workload) -> Self {
        let never = vec![0.0; plan.units.len()];
        Self {
            plan,
            workload,
            copies: 0.0,
            compute: 0.0,
            copied_at: never.clone(),
            last_use_at: never,
            busy: 0.0,
            copied: 0,
            stalls: Vec::new(),
        }
    }

    /// Starts the account of a step; gives the time it starts at.
    fn begin_step(&mut self) -> f64 {
        self.busy = 0.0;
        self.copied = 0;
        self.stalls.clear();
        self.compute
    }

    fn execute(&mut self, commands: &mut Vec<Command>, visit: usize) {
        // The host issues all of a visit's commands when the visit is reached.
        let issued = self.compute;
        for command in commands.drain(..) {
            match command {
                Command::WaitLastUse(unit) => {
                    self.copies = self.copies.max(self.last_use_at[unit.0 as usize]);
                }
                Command::Evict(_) => {}
                Command::Copy(unit) => {
                    let bytes = self.plan.unit(unit).map_or(0, |unit| unit.streamed_bytes().0);
                    let took =
                        self.workload.copy_latency + bytes as f64 / self.workload.link_bytes_per_second;
                    self.copies = self.copies.max(issued) + took;
                    self.busy += took;
                    self.copied += bytes;
                }
                Command::RecordCopied(unit) => self.copied_at[unit.0 as usize] = self.copies,
                Command::WaitCopied(unit) => {
                    let seconds = self.copied_at[unit.0 as usize] - self.compute;
                    if seconds > 0.0 {
                        self.stalls.push(Stall { visit, unit, seconds });
                        self.compute += seconds;
                    }
                }
                Command::RecordLastUse(unit) => self.last_use_at[unit.0 as usize] = self.compute,
            }
        }
    }
}
