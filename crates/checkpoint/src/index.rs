//! The index of a sharded model: which file beside it holds which tensor. Text of strangers, so file names are checked
//! before they become paths, and nothing is allocated beyond the limits.

use std::io::{self, Read};
use std::path::Path;

use crate::error::some;
use crate::foreign::{self, Foreign};
use crate::json::{Fault, Kind, Scanner};
use crate::{CheckpointError, Limits, Result};

/// Bytes that an entry takes in RAM beside its name.
const ENTRY: usize = size_of::<(String, u32)>() + 16;

/// What an index says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ShardIndex {
    /// The files, in the order of their names: bare names of files in the index's own folder.
    pub files: Vec<String>,
    /// Every tensor with the place of its file in `files`, in the order of the tensors' names.
    pub tensors: Vec<(String, u32)>,
    /// The bytes of all tensors, if the index says so. Writers disagree on what to count: a hint.
    pub total_size: Option<u64>,
}

/// What is wrong with an index, for [`CheckpointError::Index`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum IndexProblem {
    /// No byte at all.
    #[error("it is empty")]
    Empty,
    /// Longer than an index may be.
    #[error("it has {size} bytes, more than the {limit} allowed")]
    TooLong { size: u64, limit: u64 },
    /// Something that is no UTF-8.
    #[error("byte {at} of it is not UTF-8")]
    NotUtf8 { at: u64 },
    /// Something that is no JSON, or not that of an index.
    #[error("byte {at} of it {what}")]
    Syntax { at: u64, what: &'static str },
    /// Something after the JSON.
    #[error("byte {at} of it follows the end of the JSON")]
    AfterJson { at: u64 },
    /// Something longer than allowed.
    #[error("by byte {at} it has more than the {limit} {what} allowed")]
    Limit { at: u64, what: &'static str, limit: u64 },
    /// Something else than a JSON object.
    #[error("it is no JSON object")]
    NotAnObject,
    /// No list of tensors.
    #[error("it has no `weight_map`, which says what file holds what tensor")]
    NoWeightMap,
    /// Two lists of tensors.
    #[error("it has two `weight_map`s")]
    TwoWeightMaps,
    /// A list of tensors that is none.
    #[error("its `weight_map` is no object")]
    WeightMapKind,
    /// A list of tensors without tensors.
    #[error("its `weight_map` names no tensor")]
    NoTensor,
    /// One tensor twice.
    #[error("it names the tensor {tensor:?} twice")]
    DuplicateTensor { tensor: String },
    /// A file that is not named by text.
    #[error("it gives something other than a file's name for the tensor {tensor:?}")]
    FileKind { tensor: String },
    /// A name that is not that of a file beside the index.
    #[error(
        "it puts the tensor {tensor:?} into {file:?}, which {why}; an index may only name files of its own folder"
    )]
    Outside { tensor: String, file: String, why: &'static str },
    /// A file that leads out of the folder.
    #[error(
        "it names {file:?}, a link that leads out of the folder; open the linked files by their own names"
    )]
    Escapes { file: String },
    /// Files that are not there.
    #[error("{} of the {named} files it names are missing: {}", missing.len(), some(missing))]
    Missing { missing: Vec<String>, named: usize },
    /// A tensor that is not where the index says.
    #[error("it puts the tensor {tensor:?} into {file:?}, which does not hold it; {}", elsewhere(found.as_deref()))]
    NotInFile { tensor: String, file: String, found: Option<String> },
    /// Not a problem of the index: its bytes could not be read.
    #[error("it could not be read: {0}")]
    Unreadable(#[source] io::Error),
}

fn elsewhere(found: Option<&str>) -> String {
    found.map_or_else(|| "no other file does either".to_owned(), |file| format!("{file:?} does"))
}

impl From<Fault> for IndexProblem {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Io(error) => Self::Unreadable(error),
            Fault::Syntax { at, what } => Self::Syntax { at, what },
            Fault::NotUtf8 { at } => Self::NotUtf8 { at },
            Fault::Limit { at, what, limit } => Self::Limit { at, what, limit },
        }
    }
}

/// Reads an index of `size` bytes. `path` is for messages only; no file that it names is looked at.
///
/// # Errors
///
/// [`CheckpointError::Index`] says what is wrong with it, [`CheckpointError::Foreign`] what it is instead.
pub fn read_index(mut reader: impl Read, size: u64, path: &Path, limits: &Limits) -> Result<ShardIndex> {
    let refuse = |problem| CheckpointError::Index { path: path.into(), problem: Box::new(problem) };
    if size == 0 {
        return Err(refuse(IndexProblem::Empty));
    }
    if size > limits.max_index {
        return Err(refuse(IndexProblem::TooLong { size, limit: limits.max_index }));
    }
    let mut start = Vec::new();
    let looked = reader.by_ref().take(foreign::LOOK).read_to_end(&mut start);
    looked.map_err(|source| CheckpointError::Io { act: "read", path: path.into(), source })?;
    match Foreign::of(&start) {
        None | Some(Foreign::Json | Foreign::Text) => {}
        Some(kind) => return Err(CheckpointError::Foreign { path: path.into(), kind }),
    }
    let parser = Parser {
        scanner: Scanner::new((&start[..]).chain(reader), size),
        limits,
        files: std::collections::BTreeMap::new(),
        tensors: Vec::new(),
        memory: 0,
    };
    parser.run().map_err(|problem| match problem {
        IndexProblem::Unreadable(source) => CheckpointError::Io { act: "read", path: path.into(), source },
        problem => refuse(problem),
    })
}

struct Parser<'a, R> {
    scanner: Scanner<R>,
    limits: &'a Limits,
    /// Files by name, with their number in the order of appearance.
    files: std::collections::BTreeMap<String, u32>,
    tensors: Vec<(String, u32)>,
    memory: usize,
}

impl<R: Read> Parser<'_, R> {
    fn run(mut self) -> Result<ShardIndex, IndexProblem> {
        if self.scanner.kind()? != Kind::Object {
            return Err(IndexProblem::NotAnObject);
        }
        self.scanner.expect(b'{', "")?;
        let (mut has_map, mut total_size) = (false, None);
        let mut first = true;
        while self.scanner.next_member(b'}', first)? {
            first = false;
            match self.scanner.key(self.limits.max_name, "bytes in a name")?.as_str() {
                "weight_map" if has_map => return Err(IndexProblem::TwoWeightMaps),
                "weight_map" => {
                    has_map = true;
                    self.weight_map()?;
                }
                "metadata" if self.scanner.kind()? == Kind::Object => total_size = self.total_size()?,
                _ => self.scanner.skip()?,
            }
        }
        if self.scanner.token()?.is_some() {
            return Err(IndexProblem::AfterJson { at: self.scanner.position() });
        }
        if !has_map {
            return Err(IndexProblem::NoWeightMap);
        }
        self.finish(total_size)
    }

    /// Sorts what was read, and finds names that came twice.
    fn finish(self, total_size: Option<u64>) -> Result<ShardIndex, IndexProblem> {
        let mut tensors = self.tensors;
        if tensors.is_empty() {
            return Err(IndexProblem::NoTensor);
        }
        tensors.sort_unstable();
        if let Some(pair) = tensors.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(IndexProblem::DuplicateTensor { tensor: pair[0].0.clone() });
        }
        let mut places = vec![0; self.files.len()];
        for (place, number) in (0..).zip(self.files.values()) {
            places[*number as usize] = place;
        }
        for (_, file) in &mut tensors {
            *file = places[*file as usize];
        }
        Ok(ShardIndex { files: self.files.into_keys().collect(), tensors, total_size })
    }

    fn weight_map(&mut self) -> Result<(), IndexProblem> {
        if self.scanner.kind()? != Kind::Object {
            return Err(IndexProblem::WeightMapKind);
        }
        self.scanner.expect(b'{', "")?;
        let mut first = true;
        while self.scanner.next_member(b'}', first)? {
            first = false;
            let tensor = self.scanner.key(self.limits.max_name, "bytes in a name")?;
            if self.scanner.kind()? != Kind::Text {
                return Err(IndexProblem::FileKind { tensor });
            }
            let file = self.scanner.text_in_place(self.limits.max_name, "bytes in a file's name")?;
            let known = self.files.get(file).copied();
            let file = if known.is_none() { file.to_owned() } else { String::new() };
            self.memory += ENTRY + tensor.len();
            if self.memory > self.limits.max_memory {
                return Ok(self.scanner.limit("bytes of RAM for what it says", self.limits.max_memory)?);
            }
            let number = match known {
                Some(number) => number,
                None => self.file(file, &tensor)?,
            };
            self.tensors.push((tensor, number));
        }
        Ok(())
    }

    /// A file that was not named before.
    fn file(&mut self, file: String, tensor: &str) -> Result<u32, IndexProblem> {
        if let Some(why) = not_bare(&file) {
            return Err(IndexProblem::Outside { tensor: tensor.to_owned(), file, why });
        }
        if self.files.len() == self.limits.max_files {
            return Ok(self.scanner.limit("files", self.limits.max_files)?);
        }
        let number = self.files.len() as u32;
        self.files.insert(file, number);
        Ok(number)
    }

    /// The total that the index's metadata gives, if it is a number that makes sense.
    fn total_size(&mut self) -> Result<Option<u64>, IndexProblem> {
        self.scanner.expect(b'{', "")?;
        let mut total = None;
        let mut first = true;
        while self.scanner.next_member(b'}', first)? {
            first = false;
            let key = self.scanner.key_in_place(self.limits.max_name, "bytes in a name")?;
            if key == "total_size" && self.scanner.kind()? == Kind::Number {
                total = self.scanner.number()?.parse().ok();
            } else {
                self.scanner.skip()?;
            }
        }
        Ok(total)
    }
}

/// Why a name is not that of a file in the index's own folder, by its letters alone.
fn not_bare(file: &str) -> Option<&'static str> {
    match file {
        "" => Some("is no name"),
        "." | ".." => Some("is a folder"),
        _ if file.contains('\0') => Some("has a zero byte"),
        _ if file.starts_with('/') => Some("is an absolute path"),
        _ if file.split(['/', '\\']).any(|part| part == "..") => Some("leads out of the folder"),
        _ if file.contains(['/', '\\']) => Some("is a path"),
        // `C:x` is a path of another drive where there are drives.
        _ if file.as_bytes().get(1) == Some(&b':') => Some("names a drive"),
        _ => None,
    }
}
