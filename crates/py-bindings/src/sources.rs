//! Where a tensor's bytes are: in memory, or still those of the file that it was loaded from.

use std::collections::HashMap;
use std::sync::Arc;

use checkpoint::{FileSpan, OpenFile, file_span};
use pyo3::prelude::*;
use weightstream::{Bytes, FileBytes, HostBytes, SourceBytes, SourceFile};

use crate::dlpack;
use crate::error::Failure;

/// The files that one model's tensors were loaded from.
#[derive(Debug, Default)]
pub(crate) struct Files {
    /// By the address of the open file, which is held here so that nobody else gets it.
    known: HashMap<usize, (Arc<OpenFile>, Arc<SourceFile>)>,
}

impl Files {
    /// The bytes of a tensor that `keep`, its Python storages, keeps alive.
    ///
    /// Bytes of a file that we have mapped are taken from the file, so that nothing is copied and nothing reads the
    /// mapping. Those in pages that were written to since are not the file's any more: they are copied as they are now.
    pub(crate) fn bytes_at(
        &mut self,
        address: u64,
        size: Bytes,
        keep: Py<PyAny>,
    ) -> Result<SourceBytes, Failure> {
        let span = file_span(std::ptr::with_exposed_provenance(address as usize), size.0);
        let Some(span) = span.filter(|_| size > Bytes::ZERO) else {
            return Ok(dlpack::host_bytes(address, size, keep).into());
        };
        if span.is_unmodified() {
            let file = self.source(span.file())?;
            return Ok(FileBytes::new(&file, span.offset(), size)?.into());
        }
        Ok(HostBytes::of(&Arc::new(changed(&span)?)).into())
    }

    fn source(&mut self, file: &Arc<OpenFile>) -> Result<Arc<SourceFile>, Failure> {
        let key = Arc::as_ptr(file).addr();
        if let Some((_, known)) = self.known.get(&key) {
            return Ok(Arc::clone(known));
        }
        let source = SourceFile::new(Arc::clone(file.file()), file.path())?;
        // After: what the source remembers is then what was opened.
        file.check_unchanged()?;
        self.known.insert(key, (Arc::clone(file), Arc::clone(&source)));
        Ok(source)
    }
}

fn changed(span: &FileSpan) -> Result<Vec<u8>, Failure> {
    let mut bytes = vec![0; span.size() as usize];
    span.read("a tensor that was changed in memory", 0, &mut bytes)?;
    Ok(bytes)
}
