//! Named records of workloads: identities and entries cross as JSON.

use std::path::PathBuf;

use profile_store::{Identity, Json, Loaded, Record, Store, StoreError, default_folder};
use pyo3::prelude::*;

use crate::error::{Class, Failure, guarded};

/// A record as JSON, and what was wrong with its file.
type Read = (Option<String>, Vec<String>);

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::new(Class::Profile, error.to_string())
    }
}

fn parse(text: &str) -> Result<Json, Failure> {
    Json::parse(text.as_bytes()).map_err(|refusal| Failure::new(Class::Profile, refusal.reason))
}

fn identity(text: &str) -> Result<Identity, Failure> {
    Ok(Identity::of(parse(text)?)?)
}

#[pyfunction]
pub(crate) fn profile_folder() -> PyResult<PathBuf> {
    Ok(guarded(|| Ok(default_folder()?))?)
}

#[pyfunction]
pub(crate) fn profile_key(identity: &str) -> PyResult<String> {
    Ok(guarded(|| Ok(self::identity(identity)?.key().to_owned()))?)
}

#[pyfunction]
pub(crate) fn profile_load(py: Python<'_>, folder: PathBuf, identity: &str) -> PyResult<Read> {
    let read = || Ok(read(Store::at(folder).load(&self::identity(identity)?)));
    Ok(py.detach(|| guarded(read))?)
}

/// Under the folder's lock: `change` gets the record as JSON and answers the entries to put, as JSON, null for those to remove.
#[pyfunction]
pub(crate) fn profile_update(
    py: Python<'_>,
    folder: PathBuf,
    identity: &str,
    change: &Bound<'_, PyAny>,
) -> PyResult<Read> {
    let change = change.clone().unbind();
    let mut raised = None;
    let updated = py.detach(|| {
        guarded(|| {
            let identity = self::identity(identity)?;
            let outcome = Store::at(folder).update(&identity, |record| {
                let entries = Python::attach(|py| {
                    let answer = change.call1(py, (record.to_json(),));
                    answer.and_then(|answer| answer.extract::<String>(py))
                });
                match entries {
                    Ok(entries) => apply(record, &entries),
                    Err(error) => {
                        raised = Some(error);
                        Err(refused("a change", "it raised"))
                    }
                }
            })?;
            let (record, notices) = outcome;
            Ok(read(Loaded { record: Some(record), notices }))
        })
    });
    match raised {
        Some(error) => Err(error),
        None => Ok(updated?),
    }
}

fn apply(record: &mut Record, entries: &str) -> Result<(), StoreError> {
    let entries = Json::parse(entries.as_bytes()).map_err(|refusal| refused("entries", &refusal.reason))?;
    let Json::Object(members) = entries else { return Err(refused("entries", "they are no object")) };
    for (name, entry) in members {
        if entry == Json::Null {
            record.remove(&name);
        } else {
            record.put(&name, entry)?;
        }
    }
    Ok(())
}

fn refused(what: &str, reason: &str) -> StoreError {
    StoreError::Refused { what: what.into(), reason: reason.into() }
}

fn read(loaded: Loaded) -> Read {
    let notices = loaded.notices.iter().map(ToString::to_string).collect();
    (loaded.record.map(|record| record.understood_json()), notices)
}
