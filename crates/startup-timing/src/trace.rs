//! Reports from times that were measured elsewhere: on a device, or by another clock.

use crate::clock::Clock;
use crate::error::{Result, TimingError};
use crate::phase::{Amounts, Levels, Phase, PhaseId, Status};
use crate::record::{MAX_DEPTH, MAX_PHASES, cut};
use crate::report::{ProcessFacts, Report};

/// Builds a report phase by phase, parents first. Times are nanoseconds from its start.
#[derive(Debug, Clone)]
pub struct TraceBuilder {
    report: Report,
    depths: Vec<usize>,
}

impl TraceBuilder {
    /// An empty one of this process, called `name`.
    pub fn new(name: &str) -> Self {
        let process =
            ProcessFacts { pid: std::process::id(), name: cut(name.into()), ..ProcessFacts::default() };
        let report = Report {
            complete: true,
            duration: 0,
            clock: Clock::start(),
            processes: vec![process],
            phases: Vec::new(),
            dropped: 0,
            environment: serde_json::Map::new(),
            notes: Vec::new(),
        };
        Self { report, depths: Vec::new() }
    }

    /// Adds a phase on a thread or lane of that name. It must lie inside its parent.
    pub fn phase(
        &mut self,
        parent: Option<PhaseId>,
        lane: &str,
        name: &str,
        start: u64,
        duration: u64,
    ) -> Result<PhaseId> {
        let phases = &self.report.phases;
        let mut depth = 0;
        let end = start.saturating_add(duration);
        if let Some(id) = parent {
            let index =
                id.index().filter(|&index| index < phases.len()).ok_or(TimingError::UnknownPhase(id))?;
            depth = self.depths[index] + 1;
            if start < phases[index].start {
                return Err(TimingError::OutOfOrder { at: start, last: phases[index].start });
            }
            if end > phases[index].end() {
                return Err(TimingError::OutOfOrder { at: phases[index].end(), last: end });
            }
        }
        if phases.len() >= MAX_PHASES || depth >= MAX_DEPTH {
            return Err(TimingError::Nothing(format!(
                "a trace has at most {MAX_PHASES} phases, {MAX_DEPTH} deep"
            )));
        }
        let id = PhaseId::at(phases.len());
        self.report.duration = self.report.duration.max(end);
        self.depths.push(depth);
        self.report.phases.push(Phase {
            id,
            parent,
            outlived: None,
            name: cut(name.into()),
            start,
            duration,
            status: Status::Success,
            error_type: None,
            thread: cut(lane.into()),
            process: 0,
            counters: Amounts::new(),
            levels: Levels::new(),
            sync_before: 0,
            sync_inside: 0,
        });
        Ok(id)
    }

    /// Adds an amount to a phase, such as bytes copied.
    pub fn count(&mut self, id: PhaseId, name: &str, amount: i64) -> Result<()> {
        let phase = id.index().and_then(|index| self.report.phases.get_mut(index));
        phase.ok_or(TimingError::UnknownPhase(id))?.counters.insert(cut(name.into()), Some(amount));
        Ok(())
    }

    /// Adds a fact about machine, program or measurement.
    pub fn fact(&mut self, name: &str, value: impl Into<serde_json::Value>) {
        self.report.environment.insert(name.into(), value.into());
    }

    /// The report.
    pub fn finish(self) -> Report {
        self.report
    }
}
