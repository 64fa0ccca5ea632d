//! Timings of a start: the recorder that Python's phases go to, and reports as Python asks for them.

use std::path::PathBuf;

use pyo3::prelude::*;
use startup_timing::{
    Amounts, Ending, Levels, Part, PhaseId, Recorder, RecorderOptions, Report, RunSet, chrome_trace, diff,
    folded_stacks, merge, read, read_bytes, stats, table, to_json,
};

use crate::error::{Class, Failure, guarded};

/// Records phases. Python keeps their numbers, and says which one a phase is begun in.
#[pyclass(frozen, module = "weightstream._native")]
#[derive(Debug)]
pub(crate) struct StartupRecorder(Recorder);

#[pymethods]
impl StartupRecorder {
    #[new]
    #[pyo3(signature = (path = None, counters = true, rank = None, name = String::new()))]
    fn new(path: Option<PathBuf>, counters: bool, rank: Option<u32>, name: String) -> PyResult<Self> {
        Ok(guarded(|| Ok(Self(Recorder::new(RecorderOptions { path, counters, rank, name })?)))?)
    }

    #[pyo3(signature = (name, parent, thread, sync))]
    fn begin(&self, name: &str, parent: Option<u64>, thread: &str, sync: u64) -> PyResult<Option<u64>> {
        let begun = guarded(|| Ok(self.0.begin(name, parent.map(PhaseId), thread, sync)?))?;
        Ok(begun.map(|id| id.0))
    }

    #[pyo3(signature = (phase, error, sync, counters = None, levels = None))]
    fn end(
        &self,
        phase: u64,
        error: Option<String>,
        sync: u64,
        counters: Option<Amounts>,
        levels: Option<Levels>,
    ) -> PyResult<()> {
        let (counters, levels) = (counters.unwrap_or_default(), levels.unwrap_or_default());
        let ending = Ending { error, counters, levels, sync };
        Ok(guarded(|| Ok(self.0.end(PhaseId(phase), ending)?))?)
    }

    fn environment(&self, facts: &str) -> PyResult<()> {
        Ok(guarded(|| {
            let facts = serde_json::from_str(facts)
                .map_err(|error| Failure::new(Class::Timing, format!("facts are a JSON object: {error}")))?;
            Ok(self.0.environment(facts)?)
        })?)
    }

    fn note(&self, text: String) -> PyResult<()> {
        Ok(guarded(|| Ok(self.0.note(text)?))?)
    }

    fn now(&self) -> Option<u64> {
        self.0.now()
    }

    fn report(&self) -> Option<StartupReport> {
        self.0.report().map(StartupReport)
    }

    fn finish(&self, at: u64) -> Option<StartupReport> {
        self.0.finish_at(at).map(StartupReport)
    }
}

/// A report.
#[pyclass(frozen, module = "weightstream._native")]
#[derive(Debug)]
pub(crate) struct StartupReport(Report);

#[pymethods]
impl StartupReport {
    #[staticmethod]
    fn read(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        Ok(py.detach(move || guarded(|| Ok(Self(read(&path)?))))?)
    }

    #[staticmethod]
    fn parse(text: &str) -> PyResult<Self> {
        Ok(guarded(|| Ok(Self(read_bytes(text.as_bytes(), "the text")?)))?)
    }

    #[staticmethod]
    fn merge(py: Python<'_>, paths: Vec<PathBuf>) -> PyResult<Self> {
        Ok(py.detach(move || {
            guarded(|| {
                let part = |path: PathBuf| Part { file: path.display().to_string(), report: read(&path) };
                Ok(Self(merge(paths.into_iter().map(part).collect())?))
            })
        })?)
    }

    fn to_json(&self) -> PyResult<String> {
        Ok(guarded(|| Ok(to_json(&self.0)?))?)
    }

    fn chrome_trace(&self) -> PyResult<String> {
        Ok(guarded(|| Ok(chrome_trace(&self.0)?))?)
    }

    fn folded_stacks(&self) -> PyResult<String> {
        Ok(guarded(|| Ok(folded_stacks(&self.0)?))?)
    }

    fn table(&self) -> PyResult<String> {
        Ok(guarded(|| Ok(table(&self.0)?.to_string()))?)
    }
}

/// The runs of these files. One that cannot be read is an error: what is typical of the others would not be of all.
fn runs(paths: Vec<PathBuf>) -> Result<RunSet, Failure> {
    let mut set = RunSet::new();
    for path in paths {
        set.add(&read(&path)?)?;
    }
    Ok(set)
}

/// JSON and a table of what is typical of runs.
#[pyfunction]
pub(crate) fn startup_stats(
    py: Python<'_>,
    paths: Vec<PathBuf>,
    confidence: f64,
) -> PyResult<(String, String)> {
    Ok(py.detach(move || {
        guarded(|| {
            let set = runs(paths)?;
            let found = stats(&set, confidence)?;
            let json = serde_json::json!({ "runs": set.runs(), "failed": set.failed(), "phases": found });
            Ok((json.to_string(), set.table(&found, confidence).to_string()))
        })
    })?)
}

/// JSON and a table of how two sets of runs differ.
#[pyfunction]
pub(crate) fn startup_diff(
    py: Python<'_>,
    before: Vec<PathBuf>,
    after: Vec<PathBuf>,
    confidence: f64,
    threshold: f64,
) -> PyResult<(String, String)> {
    Ok(py.detach(move || {
        guarded(|| {
            let found = diff(&runs(before)?, &runs(after)?, confidence, threshold)?;
            let json = serde_json::to_string(&found).unwrap_or_default();
            Ok((json, found.table().to_string()))
        })
    })?)
}
