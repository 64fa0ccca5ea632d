//! Puts a checkpoint together: opens what each path stands for, reads headers of either format, merges what they say.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use super::{Checkpoint, OpenOptions, indexed};
use crate::gguf::{self, GgufHeader, check_splits};
use crate::safetensors::read_header;
use crate::{CheckpointError, FileHeader, OpenFile, Result, TensorInfo, folder, index, shards};

/// A checkpoint whose files are being added.
#[derive(Debug, Default)]
pub(super) struct Building {
    files: Vec<Arc<OpenFile>>,
    headers: Vec<FileHeader>,
    gguf: Vec<Option<GgufHeader>>,
    notes: Vec<String>,
}

impl Building {
    /// Adds what `path` stands for.
    pub(super) fn add(&mut self, path: &Path, options: &OpenOptions) -> Result<()> {
        if options.exact_files {
            return self.add_file(path, options).map(drop);
        }
        let inside;
        let mut path = path;
        if path.is_dir() {
            let (chosen, note) = folder::choose(path)?;
            self.notes.extend(note);
            inside = chosen;
            path = &inside;
        }
        if folder::is_index(path) {
            return self.add_indexed(path, options);
        }
        match shards::all_of(path, &options.limits)? {
            Some(paths) => paths.iter().try_for_each(|path| self.add_file(path, options).map(drop)),
            None => self.add_file(path, options).map(drop),
        }
    }

    /// Opens one file and reads its header. Gives its place.
    fn add_file(&mut self, path: &Path, options: &OpenOptions) -> Result<usize> {
        if self.files.len() >= options.limits.max_files {
            return Err(CheckpointError::TooManyFiles { path: path.into(), limit: options.limits.max_files });
        }
        let file = OpenFile::open(path)?;
        let same = |other: &Arc<OpenFile>| other.device_and_inode() == file.device_and_inode();
        if let Some(place) = self.files.iter().position(same) {
            self.notes.push(format!("{} was named twice and read once", path.display()));
            return Ok(place);
        }
        let (header, gguf) = read_any(&file, self.files.len(), options)?;
        if header.trailing > 0 {
            self.notes.push(format!(
                "{} bytes after the last tensor of {} were left out",
                header.trailing,
                path.display()
            ));
        }
        self.files.push(Arc::new(file));
        self.headers.push(header);
        let notes = gguf.iter().flat_map(GgufHeader::notes);
        self.notes.extend(notes.map(|note| format!("{}: {note}", path.display())));
        self.gguf.push(gguf);
        Ok(self.files.len() - 1)
    }

    /// Opens the files of an index and compares the two.
    fn add_indexed(&mut self, path: &Path, options: &OpenOptions) -> Result<()> {
        let file = OpenFile::open(path)?;
        let index = index::read_index(Reader::new(&file), file.size(), path, &options.limits)?;
        drop(file);
        let refuse = |problem| CheckpointError::Index { path: path.into(), problem: Box::new(problem) };
        let folder = shards::folder_of(path);
        let paths = indexed::paths(folder, &index).map_err(refuse)?;
        let mut places = Vec::new();
        for path in &paths {
            places.push(self.add_file(path, options)?);
        }
        indexed::compare(&index, &places, &self.headers, &mut self.notes).map_err(refuse)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let strays = folder::models(folder)?;
        let strays =
            strays.iter().map(String::as_str).filter(|stray| !index.files.iter().any(|file| file == stray));
        self.notes.extend(folder::left_out(&name, strays));
        Ok(())
    }

    /// Puts the headers together.
    pub(super) fn finish(self, options: &OpenOptions) -> Result<Checkpoint> {
        let Self { files, headers, gguf, mut notes } = self;
        let parts = files.iter().zip(&gguf).zip(&headers);
        let parts = parts
            .filter_map(|((file, gguf), header)| Some((file.path(), gguf.as_ref()?, header.tensors.len())));
        if !options.exact_files {
            check_splits(&parts.collect::<Vec<_>>())?;
        }
        let mut tensors = Vec::new();
        let mut file_metadata = Vec::new();
        let mut metadata = BTreeMap::new();
        for (place, header) in headers.into_iter().enumerate() {
            for (key, value) in &header.metadata {
                let first = metadata.entry(key.clone()).or_insert_with(|| value.clone());
                // The parts of a split GGUF differ in their number, and were compared above.
                if first != value && !key.starts_with("split.") {
                    let path = files[place].path().display();
                    notes.push(format!(
                        "{path} says something else than the files before it for the metadata key {key:?}"
                    ));
                }
            }
            file_metadata.push(header.metadata);
            tensors.extend(header.tensors.into_iter().map(|tensor| TensorInfo { file: place, ..tensor }));
        }
        // Before the filter: a file that names a tensor of another is broken, whoever asks for what.
        refuse_duplicates(&tensors, &files)?;
        let wanted = |t: &TensorInfo| options.prefixes.iter().any(|prefix| t.name.starts_with(prefix));
        if !options.prefixes.is_empty() {
            tensors.retain(wanted);
        }
        let by_name = sorted_by_name(&tensors);
        Ok(Checkpoint { files, file_metadata, gguf, tensors, by_name, metadata, notes })
    }
}

/// The header of a file of any format read here, `place` among those of its model.
fn read_any(
    file: &OpenFile,
    place: usize,
    options: &OpenOptions,
) -> Result<(FileHeader, Option<GgufHeader>)> {
    let (limits, trailing) = (&options.limits, options.allow_trailing);
    let mut magic = [0; 4];
    let by_magic = file.size() >= 4 && file.read_exact_at(0, &mut magic).is_ok_and(|()| magic == gguf::MAGIC);
    if by_magic || file.path().extension().is_some_and(|extension| extension == "gguf") {
        let (header, gguf) = gguf::read_header(file, place, limits, trailing)?;
        return Ok((header, Some(gguf)));
    }
    Ok((read_header(Reader::new(file), file.size(), file.path(), limits, trailing)?, None))
}

fn sorted_by_name(tensors: &[TensorInfo]) -> Vec<u32> {
    let mut order: Vec<_> = (0..tensors.len() as u32).collect();
    order.sort_unstable_by(|a, b| tensors[*a as usize].name.cmp(&tensors[*b as usize].name));
    order
}

/// One name in two files is an error: whichever were taken would be wrong for someone.
fn refuse_duplicates(tensors: &[TensorInfo], files: &[Arc<OpenFile>]) -> Result<()> {
    let order = sorted_by_name(tensors);
    let mut pairs = order.windows(2).map(|pair| (&tensors[pair[0] as usize], &tensors[pair[1] as usize]));
    let Some((a, b)) = pairs.find(|(a, b)| a.name == b.name) else { return Ok(()) };
    let path = |file: usize| files[file].path().to_owned();
    let (first, second) = (path(a.file.min(b.file)), path(a.file.max(b.file)));
    Err(CheckpointError::DuplicateTensor { tensor: a.name.clone(), first, second })
}

/// Reads a file from its start, whatever else reads it.
#[derive(Debug)]
struct Reader<'a> {
    file: &'a File,
    at: u64,
}

impl<'a> Reader<'a> {
    fn new(file: &'a OpenFile) -> Self {
        Self { file: file.file(), at: 0 }
    }
}

impl Read for Reader<'_> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(target, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}
