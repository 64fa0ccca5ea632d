//! Whose turn it is in one model, and a unit's turn around one forward as one call: the steps of a turn are few and
//! always the same, and as Python they cost several times what the engine does in them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use weightstream::{StreamHandle, UnitId};

use crate::offloader::{Inner, Offloader};

/// Stands for the root's forward among the open units.
const ROOT: i64 = -1;
/// No thread's number.
const NOBODY: u64 = 0;

static NEXT: AtomicU64 = AtomicU64::new(NOBODY + 1);

thread_local! {
    /// This thread's number, which no other thread of the process ever has.
    static HERE: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
}

/// The open turns of one model.
#[pyclass(frozen, module = "weightstream._native")]
#[derive(Debug)]
pub(crate) struct Turns {
    offloader: Arc<Inner>,
    /// Units that are entered, oldest first, and marks below zero. Shared with Python.
    #[pyo3(get)]
    open: Py<PyList>,
    /// What is in `open` while the root's forward runs and no unit's does.
    root: Py<PyAny>,
    /// Gives the raw pointer of the current stream; none on the emulator.
    stream: Option<Py<PyAny>>,
    is_grad_enabled: Py<PyAny>,
    /// The thread that opened the turns, as Python numbers it and as we do.
    thread: AtomicU64,
    here: AtomicU64,
}

#[pymethods]
impl Turns {
    #[new]
    fn new(
        py: Python<'_>,
        offloader: &Bound<'_, Offloader>,
        stream: Option<Py<PyAny>>,
        is_grad_enabled: Py<PyAny>,
    ) -> PyResult<Self> {
        Ok(Self {
            offloader: Arc::clone(&offloader.get().inner),
            open: PyList::empty(py).unbind(),
            root: ROOT.into_pyobject(py)?.into_any().unbind(),
            stream,
            is_grad_enabled,
            thread: AtomicU64::new(0),
            here: AtomicU64::new(NOBODY),
        })
    }

    #[getter]
    fn thread(&self) -> u64 {
        self.thread.load(Ordering::Relaxed)
    }

    /// Called by the thread itself.
    #[setter]
    fn set_thread(&self, ident: u64) {
        self.thread.store(ident, Ordering::Relaxed);
        self.here.store(HERE.with(|&here| here), Ordering::Relaxed);
    }

    /// Whether the root's forward runs on this thread, and no unit's within it.
    fn at_root(&self, py: Python<'_>) -> PyResult<bool> {
        let open = self.open.bind(py);
        Ok(self.is_here() && open.len() == 1 && open.get_item(0)?.is(&self.root))
    }

    /// Calls `inner` in a turn of `unit`, which takes off what is `guarded`. `runtime` is asked wherever the turn is not
    /// plainly the next one of a running step.
    #[expect(clippy::too_many_arguments, reason = "an object for them would cost as much as the call")]
    fn take<'py>(
        &self,
        py: Python<'py>,
        runtime: &Bound<'py, PyAny>,
        unit: u32,
        name: &Bound<'py, PyAny>,
        inner: &Bound<'py, PyAny>,
        guarded: &Bound<'py, PyList>,
        args: &Bound<'py, PyTuple>,
        kwargs: &Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if !self.at_root(py)? && !self.follows(py, unit)? {
            let within = runtime.call_method1(intern!(py, "arrive"), (unit, name))?;
            if within.is_truthy()? {
                return inner.call(args, Some(kwargs));
            }
        }
        let graded = self.is_grad_enabled.bind(py).call0()?.is_truthy()?;
        if graded {
            refuse_grad(runtime, name, "input", args)?;
            refuse_grad(runtime, name, "input", &kwargs.values())?;
        }
        // Noted before it is entered: what fails from here on has a turn to end.
        self.open.bind(py).append(unit)?;
        let result = self.enter(py, unit).and_then(|()| {
            take_off(guarded)?;
            inner.call(args, Some(kwargs))
        });
        self.close(py)?;
        put_back(guarded)?;
        match &result {
            Ok(value) => {
                self.leave(py, unit)?;
                if graded {
                    refuse_grad(runtime, name, "output", &PyList::new(py, [value])?.into_any())?;
                }
            }
            Err(_) => drop(runtime.call_method1(intern!(py, "abandon"), (unit,))?),
        }
        result
    }
}

impl Turns {
    fn is_here(&self) -> bool {
        self.here.load(Ordering::Relaxed) == HERE.with(|&here| here)
    }

    /// Whether a turn of `unit` may begin inside the turns that are open.
    fn follows(&self, py: Python<'_>, unit: u32) -> PyResult<bool> {
        let open = self.open.bind(py);
        Ok(self.is_here() && !open.is_empty() && open.get_item(0)?.is(&self.root) && !open.contains(unit)?)
    }

    /// Ends the turn that was opened last.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let open = self.open.bind(py);
        // A recovery may have ended all of them.
        open.len().checked_sub(1).map_or(Ok(()), |last| open.del_item(last))
    }

    fn stream(&self, py: Python<'_>) -> PyResult<StreamHandle> {
        Ok(StreamHandle(match &self.stream {
            Some(stream) => stream.bind(py).call0()?.extract()?,
            None => 0,
        }))
    }

    fn enter(&self, py: Python<'_>, unit: u32) -> PyResult<()> {
        let stream = self.stream(py)?;
        self.offloader.with(py, self.offloader.waits, |facade| facade.enter(UnitId(unit), stream))
    }

    fn leave(&self, py: Python<'_>, unit: u32) -> PyResult<()> {
        let stream = self.stream(py)?;
        self.offloader.with(py, self.offloader.waits, |facade| facade.leave(UnitId(unit), stream))
    }
}

/// The attributes of modules and their wrapped forwards that a turn takes off.
fn nets<'py>(
    guarded: &Bound<'py, PyList>,
) -> impl Iterator<Item = PyResult<(Bound<'py, PyDict>, Bound<'py, PyAny>)>> {
    guarded.iter().map(|pair| pair.extract())
}

fn take_off(guarded: &Bound<'_, PyList>) -> PyResult<()> {
    let forward = intern!(guarded.py(), "forward");
    for pair in nets(guarded) {
        let (state, net) = pair?;
        // What somebody else has set stays.
        if state.get_item(forward)?.is_some_and(|now| now.is(&net)) {
            state.del_item(forward)?;
        }
    }
    Ok(())
}

fn put_back(guarded: &Bound<'_, PyList>) -> PyResult<()> {
    let forward = intern!(guarded.py(), "forward");
    for pair in nets(guarded) {
        let (state, net) = pair?;
        if !state.contains(forward)? {
            state.set_item(forward, net)?;
        }
    }
    Ok(())
}

fn refuse_grad(
    runtime: &Bound<'_, PyAny>,
    name: &Bound<'_, PyAny>,
    what: &str,
    values: &Bound<'_, PyAny>,
) -> PyResult<()> {
    runtime.call_method1(intern!(runtime.py(), "refuse_grad"), (name, what, values))?;
    Ok(())
}
