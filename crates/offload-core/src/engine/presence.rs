//! A model among others on one device: coming, leaving, and letting another one use the ring.
//!
//! ```text
//!   here ── vacate: own pages to the others, poison behind their addresses ──▶ away ── a step begins, or arrive ──▶ here
//!   here ── rest: nothing of it is present in the ring any more ──▶ here
//! ```
//!
//! All of it happens between steps, after a host wait for the work that touches the pages. What fails half way is made good
//! by the model's next step, as after a replan.
#![forbid(unsafe_code)]

use std::sync::Arc;

use gpu_driver::StreamHandle;
use vmm_alloc::Page;

use super::core::Engine;
use super::error::{EngineError, Result};
use super::state::State;

impl Engine {
    /// Whether the model is on the device: false before its first step among others, and after [`vacate`](Self::vacate).
    pub fn is_here(&self) -> bool {
        let state = self.lock();
        !state.away && !state.closed
    }

    /// Whether a step or a visit is under way, on any thread, or units are held.
    pub fn is_busy(&self) -> bool {
        let state = self.lock();
        !state.closed && (state.step.is_some() || state.held > 0)
    }

    /// Whether a plan waits to be put in place by the next step: a failure left it, or the model is away.
    pub fn is_pending(&self) -> bool {
        let state = self.lock();
        state.pending.is_some() && !state.closed
    }

    /// Brings the model to the device: maps its plan, with the `given` pages first, and uploads what is resident and not
    /// there. Does nothing if it is here. Blocks until that is done.
    ///
    /// # Errors
    /// If the pool has no room, `stream` is being captured, or the driver fails. The model's next step, or this, tries again.
    pub fn arrive(&self, given: Vec<Arc<Page>>, stream: StreamHandle) -> Result<()> {
        self.arrive_during(given, stream, &mut || ())
    }

    /// As [`arrive`](Self::arrive), and calls `during` once while the bytes are on their way, if it comes so far: what the link
    /// is busy with hides what that takes. `during` must not use this engine.
    ///
    /// # Errors
    /// As [`arrive`](Self::arrive).
    pub fn arrive_during(
        &self,
        given: Vec<Arc<Page>>,
        stream: StreamHandle,
        during: &mut dyn FnMut(),
    ) -> Result<()> {
        let mut state = self.lock();
        state.check_thread()?;
        if !state.away {
            return Ok(());
        }
        state.check_capture(stream)?;
        state.on_stream(stream)?;
        state.memory.take_over(given);
        if state.pending.is_some() { state.replace_plan_during(during) } else { state.come_back(during) }
    }

    /// The first half of [`vacate`](Self::vacate): the model has left, and its own pages are whoever's they are given to; its
    /// addresses read them until `vacate`, which then gives none, makes them read 0xFF. That half takes the driver long, and
    /// can be made while others' bytes are copied to those pages. Blocks as `vacate` does.
    ///
    /// # Errors
    /// If a step is under way or a unit is held: nothing was changed.
    pub fn lend(&self) -> Result<Vec<Arc<Page>>> {
        let mut state = self.lock();
        if state.closed || state.memory.shared().is_none() {
            return Ok(Vec::new());
        }
        state.check_between("leaving the device")?;
        state.depart()?;
        Ok(state.memory.lend())
    }

    /// Whether it is away, and its addresses read pages that are others' already: [`vacate`](Self::vacate) is to be called.
    pub fn owes(&self) -> bool {
        let state = self.lock();
        state.away && !state.closed && state.memory.owes()
    }

    /// Takes the model off the device and gives its own pages; addresses stay, and read 0xFF where those pages were. The
    /// ring's first `keep` pages stay mapped. Blocks until all its work has run, on the stream of
    /// its latest call; who used resident bytes on another has waited for that. A model that left before gives up what it
    /// has of the ring beyond `keep`. Does nothing to a closed model, or one that shares its device with nobody.
    ///
    /// # Errors
    /// If a step is under way or a unit is held: nothing was changed. If the driver fails: some of the pages may be mapped
    /// still; this can be called again, and the model's next step brings it back whole.
    pub fn vacate(&self, keep: u32) -> Result<Vec<Arc<Page>>> {
        let mut state = self.lock();
        if state.closed {
            return Ok(Vec::new());
        }
        state.check_between("leaving the device")?;
        if state.memory.shared().is_none() {
            return Ok(Vec::new());
        }
        if !state.memory.is_lent() {
            state.depart()?;
        }
        state.memory.leave(keep as usize)
    }

    /// Lets another model use the ring: nothing streamed is present afterwards, and the next step copies anew. Blocks until
    /// all work has run.
    ///
    /// # Errors
    /// As [`vacate`](Self::vacate).
    pub fn rest(&self) -> Result<()> {
        let mut state = self.lock();
        if state.closed || state.away {
            return Ok(());
        }
        state.check_between("giving the ring to another model")?;
        state.wait_idle()?;
        if state.pending.is_some() {
            return Ok(()); // Nothing is present when the pending plan is put in place.
        }
        state.forget_presence()
    }
}

impl State {
    /// Refuses what would change memory that somebody uses.
    pub(super) fn check_between(&self, call: &'static str) -> Result<()> {
        self.check_thread()?;
        if self.step.is_some() {
            return Err(EngineError::InStep { call });
        }
        match self.schedule.held_units().next() {
            Some(unit) => Err(EngineError::Held { call, unit }),
            None => Ok(()),
        }
    }

    /// Waits for all work of a model that leaves.
    fn depart(&mut self) -> Result<()> {
        // What is resident is used outside units and steps, too, which only the stream knows about.
        self.device.note_computation();
        self.wait_idle()?;
        self.away = true;
        self.timing.forget();
        Ok(())
    }

    /// Maps and uploads the plan again that the model left with. The order it had learned is kept.
    pub(super) fn come_back(&mut self, during: &mut dyn FnMut()) -> Result<()> {
        self.wait_idle()?;
        let plan = Arc::clone(&self.plan);
        self.memory.reach(&plan)?;
        self.upload(&plan, during)?;
        self.forget_presence()?;
        self.away = false;
        self.stats.arrivals += 1;
        Ok(())
    }
}
