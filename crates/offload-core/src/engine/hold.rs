//! Units made present outside their turn, until released.
#![forbid(unsafe_code)]

use gpu_driver::StreamHandle;

use super::error::{EngineError, Result};
use super::state::State;
use crate::model::UnitId;

impl State {
    /// Makes units present until released, for use outside their turn.
    pub(super) fn hold(&mut self, units: &[UnitId], stream: StreamHandle) -> Result<()> {
        self.check_thread()?;
        if self.step.is_none() {
            self.prepare(stream)?;
        } else if self.failed {
            return Err(EngineError::StepFailed);
        }
        self.check_capture(stream)?;
        self.on_stream(stream)?;
        self.device.note_computation();
        for (index, &unit) in units.iter().enumerate() {
            self.commands.clear();
            let held = match self.schedule.hold(unit, &mut self.commands) {
                Ok(()) => {
                    self.run_commands().inspect_err(|_| _ = self.schedule.release(unit, &mut Vec::new()))
                }
                Err(error) => Err(self.named(error)),
            };
            if let Err(error) = held {
                self.release(&units[..index], stream)?;
                return Err(error);
            }
            self.held += 1;
        }
        Ok(())
    }

    /// Ends a hold.
    pub(super) fn release(&mut self, units: &[UnitId], stream: StreamHandle) -> Result<()> {
        if self.closed {
            return Ok(());
        }
        let mut result = Ok(());
        for &unit in units {
            self.commands.clear();
            let released = self.schedule.release(unit, &mut self.commands).map_err(|error| self.named(error));
            let released = released.and_then(|()| {
                self.device.note_computation();
                self.held -= 1;
                if self.failed {
                    return Ok(()); // The next step waits for all use before anything is overwritten.
                }
                self.on_stream(stream)?;
                self.run_commands()
            });
            result = result.and(released);
        }
        result
    }
}
