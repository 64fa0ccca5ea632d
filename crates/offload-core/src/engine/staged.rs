//! Executing commands where some bytes pass through the staging ring: what goes to the copy stream is put together to jobs.
#![forbid(unsafe_code)]

use std::sync::Arc;

use gpu_driver::Access;
use pinned_pool::StagedStep;

use super::device::{Device, POISON, unknown};
use super::error::Result;
use super::memory::Memory;
use super::staging::Staging;
use super::stats::EngineStats;
use crate::model::UnitId;
use crate::plan::Plan;
use crate::schedule::Command;

impl Device {
    /// As [`execute`](Self::execute). Host waits for reads come last, when everything else of the call is under way.
    pub(super) fn execute_staged(
        &mut self,
        staging: &mut Staging,
        commands: &[Command],
        plan: &Plan,
        memory: &Memory,
        stats: &mut EngineStats,
    ) -> Result<()> {
        for &command in commands {
            match command {
                Command::WaitLastUse(unit) => {
                    staging.begin_with(StagedStep::Wait(Arc::clone(&self.of(unit)?.last_use)));
                    stats.waits += 1;
                }
                Command::Evict(unit) => self.evict_staged(staging, unit, plan, memory)?,
                Command::Copy(unit) => self.copy_staged(staging, unit, plan, memory, stats)?,
                Command::RecordCopied(unit) => {
                    staging.submit(unit, &self.of(unit)?.copied, self.copies(), stats)?;
                    if self.guard {
                        staging.flush()?; // Access is changed by the host, at once.
                    }
                }
                Command::WaitCopied(_) => {}
                Command::RecordLastUse(unit) => self.of(unit)?.last_use.record(self.compute()?)?,
            }
        }
        for &command in commands {
            if let Command::WaitCopied(unit) = command {
                #[cfg(test)]
                let waits = !self.forgets_reads;
                #[cfg(not(test))]
                let waits = true;
                if waits {
                    staging.wait_submitted(unit, stats)?;
                }
                self.of(unit)?.copied.hold(self.compute()?)?;
                stats.waits += 1;
            }
        }
        Ok(())
    }

    fn copy_staged(
        &mut self,
        staging: &mut Staging,
        unit: UnitId,
        plan: &Plan,
        memory: &Memory,
        stats: &mut EngineStats,
    ) -> Result<()> {
        if self.guard
            && let Some(planned) = plan.unit(unit)
        {
            memory.guard(&planned.streamed, Access::ReadWrite)?;
        }
        let copy = staging.set_copy(unit).ok_or_else(unknown)?;
        stats.copies += 1;
        stats.copied_bytes += copy.bytes().0;
        self.count_copy(unit);
        Ok(())
    }

    /// The unit's bytes are about to be overwritten: spoils them, or shuts their addresses. The guard mode waits.
    fn evict_staged(&self, staging: &mut Staging, unit: UnitId, plan: &Plan, memory: &Memory) -> Result<()> {
        let planned = plan.unit(unit).ok_or_else(unknown)?;
        if self.poison {
            staging.begin_with(StagedStep::Fill {
                space: Arc::clone(&memory.space),
                offset: planned.streamed.start,
                bytes: planned.streamed_bytes(),
                value: POISON,
            });
        }
        if self.guard {
            staging.flush()?;
            self.copies().drain()?;
            memory.guard(&planned.streamed, Access::None)?;
        }
        Ok(())
    }
}
