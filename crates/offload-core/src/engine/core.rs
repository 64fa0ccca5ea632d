//! The engine: one model's addresses, and the calls that keep the right bytes behind them.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use gpu_driver::{Bytes, DeviceAddress, Driver, StreamHandle};
use pinned_pool::StagingOptions;
use vmm_alloc::{AddressSpace, PagePool};

use super::device::Device;
use super::error::{EngineError, Result};
use super::memory::Memory;
use super::replan::check_plan;
use super::shared::SharedPages;
use super::source::{Source, check_source};
use super::state::State;
use super::stats::{EngineReport, EngineStats, StagingStats, UnitReport};
use super::timing::{StepTimes, StepTrace};
use crate::layout::Layout;
use crate::model::{TensorId, UnitId};
use crate::plan::{Plan, UnitPlan};

/// What an engine is made of.
#[derive(Debug, Clone)]
pub struct EngineDesc {
    /// The device.
    pub driver: Arc<dyn Driver>,
    /// Where tensors lie.
    pub layout: Layout,
    /// What is resident and what streams.
    pub plan: Plan,
    /// Where pages come from; its limit is the budget.
    pub pool: PagePool,
    /// Where the bytes are in host memory.
    pub source: Arc<dyn Source>,
    /// How to run.
    pub options: EngineOptions,
}

/// Ways of running: what costs time and finds mistakes, and the staging ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineOptions {
    /// Overwrites a unit's ring bytes with 0xFF when they are given up, on the copy stream and with the same waits as the
    /// copy that follows, so that a missing wait or a use outside a unit's turn computes NaN.
    pub poison_after_use: bool,
    /// Makes a unit that is not present inaccessible, in the granules wholly its own. Makes the host wait, so that timing
    /// is not that of a real run.
    pub guard: bool,
    /// How the device's staging ring is made, if this is the first engine to need it.
    pub staging: StagingOptions,
}

/// Runs one model through its plan.
///
/// A step is `begin_step`, then `enter` and `leave` around each use of a unit, then `end_step`; a unit may also be
/// entered outside any step. One thread at a time: a call in the middle of another thread's step is refused.
///
/// **Streams.** Every call names the compute stream, which may change from call to call: a stream that takes over
/// waits for what the one before it holds. Work is ordered on the stream of the latest call only. A stream must stay
/// alive until a step on it was ended, or until another was named; while units are held, until they are released.
///
/// No call makes the host wait, except [`new`](Self::new), [`replan`](Self::replan), [`close`](Self::close), and the
/// first call after a failure; and, if the source has bytes that are not page-locked ([`is_staged`](Self::is_staged)),
/// entering or holding a unit whose bytes have yet to be read: until they are, not until the device has them.
///
/// **Drop** never blocks. An engine that is dropped while the device may still use its memory leaks that memory with an
/// error in the log; [`close`](Self::close) it first.
#[derive(Debug)]
pub struct Engine {
    space: Arc<AddressSpace>,
    layout: Layout,
    state: Mutex<State>,
}

impl Engine {
    /// Reserves the addresses, maps the plan's pages, and uploads everything resident. Blocks until that is done.
    ///
    /// # Errors
    /// If the plan does not fit the layout or the page limit, if bytes of the model have no source, or if the driver
    /// refuses. Nothing is held then.
    pub fn new(desc: EngineDesc) -> Result<Self> {
        let engine = Self::unmapped(desc)?;
        engine.map()?;
        Ok(engine)
    }

    /// An engine that shares its device with others: the pool's pages, and the ring of `shared`. Nothing is mapped until a
    /// step begins or [`arrive`](Self::arrive); the plan may take at most `most` of the pool.
    ///
    /// Who uses the ring, and which models are on the device together, is decided by whoever made `shared`: at most one of
    /// its engines may be in a step that streams, and before another begins one, the first must [`rest`](Self::rest) or
    /// [`vacate`](Self::vacate).
    ///
    /// # Errors
    /// As [`new`](Self::new), as far as nothing is mapped; also if the layout's granule is not that of the pool.
    pub fn sharing(desc: EngineDesc, shared: Arc<SharedPages>, most: Bytes) -> Result<Self> {
        let granule = desc.pool.granule();
        if desc.layout.granule() != granule {
            let what = format!("a line of granules of {} in a pool of {granule}", desc.layout.granule());
            return Err(EngineError::ForeignPlan { what });
        }
        Self::made(desc, Some((shared, most)))
    }

    /// Puts the first plan in place.
    pub(super) fn map(&self) -> Result<()> {
        let mut state = self.lock();
        let mapped = state.replace_plan();
        if mapped.is_err() {
            // An upload may be under way: wait, or drop leaks.
            _ = state.device.wait_idle();
            _ = state.device.leave_ring();
        }
        state.stats.replans = 0;
        mapped
    }

    /// All but the plan, which is pending.
    pub(super) fn unmapped(desc: EngineDesc) -> Result<Self> {
        Self::made(desc, None)
    }

    fn made(desc: EngineDesc, shared: Option<(Arc<SharedPages>, Bytes)>) -> Result<Self> {
        let EngineDesc { driver, layout, plan, pool, source, options } = desc;
        let (shared, most) = shared.unzip();
        check_plan(&plan, &layout, most.unwrap_or_else(|| pool.report().limit))?;
        check_source(&*source, &layout)?;
        let device = Device::new(&driver, options.poison_after_use, options.guard)?;
        let space = AddressSpace::reserve(driver, layout.granule(), layout.granules())?;
        let memory = Memory::new(Arc::clone(&space), pool, shared);
        let mut state = State::new(Arc::new(plan), memory, device, source, options.staging, &layout)?;
        state.most = most;
        Ok(Self { space, layout, state: Mutex::new(state) })
    }

    /// A step begins on `stream`. If the one before it failed or was never ended, this first waits for all work and
    /// starts over; if a replan failed, this completes it.
    ///
    /// # Errors
    /// If another thread is in the middle of a step, if `stream` is being captured, or if the driver fails. No step has
    /// begun then.
    pub fn begin_step(&self, stream: StreamHandle) -> Result<()> {
        self.lock().begin_step(stream)
    }

    /// A step ends. What it visited is the order expected of the next, whose first copies begin now.
    ///
    /// # Errors
    /// If this thread began no step, or if the driver fails; the step has ended all the same.
    pub fn end_step(&self, stream: StreamHandle) -> Result<()> {
        self.lock().end_step(stream)
    }

    /// A unit's turn begins: work submitted to `stream` from here on reads its bytes.
    ///
    /// Where bytes are staged, this may wait for reads of a file. Other calls wait meanwhile: the unit is neither open nor not, and no
    /// state between is known to the protocol.
    ///
    /// # Errors
    /// If a unit that is open or held shares its memory, if another thread is in the middle of a step, if `stream` is
    /// being captured, if an earlier call of this step failed, or if the driver fails. The unit is not open then.
    pub fn enter(&self, unit: UnitId, stream: StreamHandle) -> Result<()> {
        let begun = Instant::now();
        let mut state = self.lock();
        let entered = state.enter(unit, stream);
        state.stats.spent(begun.elapsed());
        entered
    }

    /// A unit's turn ends: its bytes may be overwritten once what was submitted to `stream` so far has run.
    ///
    /// # Errors
    /// If the unit is not open, if another thread is in the middle of a step, or if the driver fails; the next step
    /// starts over then. After a call of this step has failed, this closes the unit and says nothing.
    pub fn leave(&self, unit: UnitId, stream: StreamHandle) -> Result<()> {
        let begun = Instant::now();
        let mut state = self.lock();
        let left = state.leave(unit, stream);
        state.stats.spent(begun.elapsed());
        left
    }

    /// Makes units present until [`release`](Self::release), for use outside their turn: all of them or none. Work that
    /// uses them goes to the stream of the engine's latest call.
    ///
    /// # Errors
    /// As [`enter`](Self::enter); also if two of the units share memory.
    pub fn hold(&self, units: &[UnitId], stream: StreamHandle) -> Result<()> {
        self.lock().hold(units, stream)
    }

    /// Ends a [`hold`](Self::hold), from any thread, once what was submitted to `stream` so far has run.
    ///
    /// # Errors
    /// If one of the units is not held, or if the driver fails; the other units are released all the same.
    pub fn release(&self, units: &[UnitId], stream: StreamHandle) -> Result<()> {
        self.lock().release(units, stream)
    }

    /// Puts another plan of the same layout in place, between steps. Blocks until all work has run.
    ///
    /// # Errors
    /// If a step is under way, a unit is held, or the plan does not fit: nothing was changed. If the driver fails, the
    /// plan stays pending, and the next step completes it before anything runs.
    pub fn replan(&self, plan: Plan) -> Result<()> {
        self.lock().replan(plan, &self.layout)
    }

    /// Times the next step that begins on this plan; costs two events a visit.
    pub fn time_next_step(&self) {
        self.lock().timing.arm();
    }

    /// What the visits of the step that was timed computed, once; `None` if there is none, or if the device has not come
    /// to its end. Never blocks. A step that failed, or in which one visit was made inside another, has no times.
    pub fn take_step_times(&self) -> Option<StepTimes> {
        self.lock().timing.take()
    }

    /// Traces the next step that begins, or the first one after it that is whole: costs two events a visit and a copy.
    pub fn trace_next_step(&self) {
        self.lock().timing.arm_trace();
    }

    /// When the step that was traced visited and copied what, once; `None` if there is none, or if the device has not come to
    /// its end. Never blocks. A step that failed, or in which one visit was made inside another, has none.
    pub fn take_step_trace(&self) -> Option<StepTrace> {
        self.lock().timing.take_trace()
    }

    /// The rate at which resident bytes were uploaded, in bytes a second, where enough were to tell.
    pub fn link_rate(&self) -> Option<f64> {
        self.lock().link_rate
    }

    /// Gives up a step whose thread will not end it. The next step, of any thread, waits for all work and starts over.
    pub fn abandon_step(&self) {
        self.lock().abandon();
    }

    /// Waits for all work, also for what `stream` holds, and gives all pages back. Addresses still leased read 0xFF afterwards, for which one page of
    /// the pool is used. Closing twice is no error. Blocks.
    ///
    /// # Errors
    /// If another thread is in the middle of a step, or if the driver fails; closing can be tried again then.
    pub fn close(&self, stream: StreamHandle) -> Result<()> {
        let mut state = self.lock();
        match state.check_thread() {
            Err(EngineError::Closed) => return Ok(()),
            other => other?,
        }
        state.abandon();
        // Resident tensors are used outside units and steps, too, which only the stream knows about.
        state.device.driver().synchronize_stream(stream)?;
        state.wait_idle()?;
        // If what follows fails, a step that begins all the same puts the plan in place anew.
        state.pending = Some(Arc::clone(&state.plan));
        state.device.prepare(Vec::new());
        state.device.leave_ring()?;
        state.memory.let_go();
        // One holder is this engine, another its memory.
        if Arc::strong_count(&self.space) > 2 && !self.space.is_retired() {
            match state.memory.shared() {
                Some(shared) => self.space.retire_to(&shared.poison()?)?,
                None => self.space.retire_to_poison(&state.memory.pool)?,
            }
        } else {
            self.space.retire()?;
        }
        state.closed = true;
        Ok(())
    }

    /// The addresses. Whoever makes tensors over them keeps this alive as long as they live.
    pub fn space(&self) -> &Arc<AddressSpace> {
        &self.space
    }

    /// Where a tensor begins, for the life of the address range.
    pub fn address(&self, tensor: TensorId) -> DeviceAddress {
        self.space.address().offset(Bytes(self.layout.offset(tensor)))
    }

    /// Where tensors lie.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Whether entering a unit may wait for bytes to be read into the staging ring.
    pub fn is_staged(&self) -> bool {
        self.lock().device.is_staged()
    }

    /// The plan in place.
    pub fn plan(&self) -> Arc<Plan> {
        Arc::clone(&self.lock().plan)
    }

    /// The visits of a step as expected now, resident units included.
    pub fn order(&self) -> Vec<UnitId> {
        self.lock().schedule.order().to_vec()
    }

    /// What was done so far.
    pub fn stats(&self) -> EngineStats {
        self.lock().stats()
    }

    /// The engine in numbers.
    pub fn report(&self) -> EngineReport {
        let state = self.lock();
        let pool = state.memory.pool.report();
        let unit = |(id, unit): (usize, &UnitPlan)| UnitReport {
            name: unit.name.clone(),
            bytes: unit.span.end - unit.span.start,
            streamed_bytes: unit.streamed_bytes().0,
            pieces: state.device.pieces(id),
            copies: state.device.copies_of(id),
        };
        EngineReport {
            stats: state.stats(),
            units: state.plan.units.iter().enumerate().map(unit).collect(),
            order: state.schedule.order().iter().map(|unit| unit.0).collect(),
            look_ahead: state.plan.look_ahead,
            page_bytes: state.plan.granule.0,
            own_pages: state.plan.own_granules,
            ring_pages: state.plan.ring_granules,
            page_limit_bytes: pool.limit.0,
            page_bytes_in_use: pool.in_use.0,
            page_bytes_peak: pool.peak.0,
            is_here: !state.away && !state.closed,
            replan_pending: state.pending.is_some(),
            recovery_pending: state.failed,
            staging: state.device.staging().map(StagingStats::from),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned: PoisonError<MutexGuard<'_, State>>| {
            // A panic in the middle of a call leaves it half done, as a failure of the driver does; it may also have taken
            // the staging ring's copies with it, so that the plan is put in place anew.
            let mut state = poisoned.into_inner();
            self.state.clear_poison();
            state.failed = true;
            if state.pending.is_none() {
                state.pending = Some(Arc::clone(&state.plan));
            }
            state
        })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let space = Arc::clone(&self.space);
        let mut state = self.lock();
        if !state.closed && !state.device.is_idle() {
            tracing::error!(address = ?space.address(), "an engine was dropped while its memory may be in use: leaked");
            std::mem::forget(space);
        }
    }
}
