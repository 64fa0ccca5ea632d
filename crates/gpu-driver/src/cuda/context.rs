//! The device's primary context, which PyTorch and every other runtime user of the process shares, and making it
//! current for the length of one call.

use std::ffi::c_int;
use std::sync::Arc;

use super::api::{Api, DEINITIALIZED, SUCCESS};
use crate::error::Result;

/// A retained primary context.
#[derive(Debug)]
pub(super) struct Context {
    api: Arc<Api>,
    device: c_int,
    handle: u64,
}

impl Context {
    /// Retains the device's primary context, making it if nobody has.
    pub(super) fn retain(api: Arc<Api>, device: c_int) -> Result<Self> {
        let mut handle = 0;
        // SAFETY: the driver is initialised, the device is one of its own, the pointer is valid for the write.
        let code = unsafe { (api.context_retain)(&raw mut handle, device) };
        api.check("cuDevicePrimaryCtxRetain", code, || format!(": device {device}"))?;
        Ok(Self { api, device, handle })
    }

    /// What the driver calls it: the same for all who retain it at a time.
    pub(super) fn handle(&self) -> u64 {
        self.handle
    }

    /// Makes the context current on this thread until the guard is dropped. Where it is already (any thread that
    /// has used PyTorch on this device), that is one cheap question.
    pub(super) fn enter(&self) -> Result<Current<'_>> {
        let api = &*self.api;
        let mut current = 0;
        // SAFETY: the pointer is valid for the write.
        let code = unsafe { (api.context_current)(&raw mut current) };
        api.check("cuCtxGetCurrent", code, String::new)?;
        let pushed = current != self.handle;
        if pushed {
            // SAFETY: the context is alive: it is retained by `self`.
            let code = unsafe { (api.context_push)(self.handle) };
            api.check("cuCtxPushCurrent", code, String::new)?;
        }
        Ok(Current { api, pushed })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once, by `retain`.
        let code = unsafe { (self.api.context_release)(self.device) };
        if code != SUCCESS && code != DEINITIALIZED {
            tracing::error!(code, device = self.device, "the primary context was not released");
        }
    }
}

/// The context is current; dropping this leaves the thread's context as it was found.
#[derive(Debug)]
pub(super) struct Current<'a> {
    api: &'a Api,
    pushed: bool,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = 0;
            // SAFETY: pops what `enter` pushed; the pointer is valid for the write.
            let code = unsafe { (self.api.context_pop)(&raw mut popped) };
            if code != SUCCESS {
                tracing::error!(code, "the thread's CUDA context could not be put back");
            }
        }
    }
}
