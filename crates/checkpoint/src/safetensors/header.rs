//! Reads the JSON of a header, entry by entry, into tensors and metadata. Offsets stay as the file has them, from the
//! start of its data; `layout.rs` checks them.

use std::collections::BTreeMap;
use std::io::Read;

use super::dtype::dtype_from_name;
use super::problem::HeaderProblem;
use crate::json::{Kind, Scanner};
use crate::{Limits, TensorInfo, TensorType};

const METADATA: &str = "__metadata__";
/// Bytes of a type's name, with room for a message about an unknown one.
const MAX_DTYPE: usize = 64;
/// Bytes that an allocation and a map's entry take beside their content, about.
const OVERHEAD: usize = 16;
const ENTRY: usize = 96;

/// What the JSON said.
#[derive(Debug, Default)]
pub(super) struct Parsed {
    pub(super) tensors: Vec<TensorInfo>,
    pub(super) metadata: BTreeMap<String, String>,
}

/// Reads a header of `length` bytes.
pub(super) fn parse<R: Read>(
    scanner: Scanner<R>,
    length: u64,
    limits: &Limits,
) -> Result<Parsed, HeaderProblem> {
    if length == 0 {
        return Err(HeaderProblem::NoHeader);
    }
    Parser { scanner, limits, parsed: Parsed::default(), memory: 0, has_metadata: false, shape: Vec::new() }
        .run()
}

/// The fields of a tensor.
#[derive(Clone, Copy)]
enum Field {
    Dtype,
    Shape,
    Offsets,
    Unknown,
}

struct Parser<'a, R> {
    scanner: Scanner<R>,
    limits: &'a Limits,
    parsed: Parsed,
    /// Bytes of RAM that `parsed` takes, about.
    memory: usize,
    has_metadata: bool,
    /// Room for one shape, used again and again.
    shape: Vec<u64>,
}

impl<R: Read> Parser<'_, R> {
    fn run(mut self) -> Result<Parsed, HeaderProblem> {
        match self.scanner.token()? {
            Some(0xEF) => return Err(HeaderProblem::ByteOrderMark),
            Some(b'{') => self.scanner.expect(b'{', "")?,
            Some(other) => {
                return Err(HeaderProblem::Opening { at: self.scanner.position(), found: char::from(other) });
            }
            None => return Ok(self.scanner.fault("is its end; it has nothing but white space")?),
        }
        let mut first = true;
        while self.scanner.next_member(b'}', first)? {
            first = false;
            let name = self.scanner.key(self.limits.max_name, "bytes in a name")?;
            if name == METADATA { self.metadata()? } else { self.tensor(name)? }
        }
        match self.scanner.token()? {
            None => {}
            Some(0) => return Err(HeaderProblem::ZeroFilled { at: self.scanner.position() }),
            Some(_) => return Err(HeaderProblem::AfterJson { at: self.scanner.position() }),
        }
        Ok(self.parsed)
    }

    /// Counts bytes that will be kept.
    fn keep(&mut self, bytes: usize) -> Result<(), HeaderProblem> {
        self.memory = self.memory.saturating_add(bytes);
        let (what, limit) = ("bytes of RAM for what it says", self.limits.max_memory);
        if self.memory > limit { Ok(self.scanner.limit(what, limit)?) } else { Ok(()) }
    }

    fn metadata(&mut self) -> Result<(), HeaderProblem> {
        if std::mem::replace(&mut self.has_metadata, true) {
            return Err(HeaderProblem::DuplicateMetadata);
        }
        match self.scanner.kind()? {
            Kind::Object => {}
            Kind::Word if self.scanner.word()? == "null" => return Ok(()),
            _ => return Err(HeaderProblem::MetadataKind),
        }
        self.scanner.expect(b'{', "")?;
        let mut left = self.limits.max_metadata;
        let mut first = true;
        while self.scanner.next_member(b'}', first)? {
            first = false;
            if self.parsed.metadata.len() == self.limits.max_metadata_entries {
                return Ok(self.scanner.limit("metadata entries", self.limits.max_metadata_entries)?);
            }
            let key = self.scanner.key(self.limits.max_name, "bytes in a name")?;
            if self.scanner.kind()? != Kind::Text {
                return Err(HeaderProblem::MetadataValue { key });
            }
            let value = self.scanner.text(left, "bytes of metadata")?;
            let bytes = key.len() + value.len();
            let Some(rest) = left.checked_sub(bytes) else {
                return Ok(self.scanner.limit("bytes of metadata", self.limits.max_metadata)?);
            };
            left = rest;
            self.keep(bytes + ENTRY)?;
            if self.parsed.metadata.contains_key(&key) {
                return Err(HeaderProblem::DuplicateKey { key });
            }
            self.parsed.metadata.insert(key, value);
        }
        Ok(())
    }

    fn tensor(&mut self, tensor: String) -> Result<(), HeaderProblem> {
        if self.parsed.tensors.len() == self.limits.max_tensors {
            return Ok(self.scanner.limit("tensors", self.limits.max_tensors)?);
        }
        let kind = self.scanner.kind()?;
        if kind != Kind::Object {
            return Err(HeaderProblem::TensorKind { tensor, found: kind.name() });
        }
        self.scanner.expect(b'{', "")?;
        let (mut dtype, mut shape, mut offsets) = (None, false, None);
        let mut first = true;
        while self.scanner.next_member(b'}', first)? {
            first = false;
            let field = match self.scanner.key_in_place(self.limits.max_name, "bytes in a name")? {
                "dtype" => Field::Dtype,
                "shape" => Field::Shape,
                "data_offsets" => Field::Offsets,
                _ => Field::Unknown,
            };
            let twice = |field| Err(HeaderProblem::DuplicateField { tensor: tensor.clone(), field });
            match field {
                Field::Dtype if dtype.is_some() => return twice("dtype"),
                Field::Shape if shape => return twice("shape"),
                Field::Offsets if offsets.is_some() => return twice("data_offsets"),
                Field::Dtype => dtype = Some(self.dtype(&tensor)?),
                Field::Shape => {
                    self.shape(&tensor)?;
                    shape = true;
                }
                Field::Offsets => offsets = Some(self.offsets(&tensor)?),
                Field::Unknown => self.scanner.skip()?,
            }
        }
        let missing = |field| HeaderProblem::MissingField { tensor: tensor.clone(), field };
        let kind = TensorType::Plain(dtype.ok_or_else(|| missing("dtype"))?);
        if !shape {
            return Err(missing("shape"));
        }
        let range = offsets.ok_or_else(|| missing("data_offsets"))?;
        self.keep(size_of::<TensorInfo>() + tensor.len() + 8 * self.shape.len() + 2 * OVERHEAD)?;
        let shape = self.shape.clone();
        self.parsed.tensors.push(TensorInfo { name: tensor, kind, shape, file: 0, range });
        Ok(())
    }

    fn dtype(&mut self, tensor: &str) -> Result<::safetensors::Dtype, HeaderProblem> {
        self.kind(Kind::Text, tensor, "dtype", "a type's name")?;
        let name = self.scanner.text(MAX_DTYPE, "bytes in a type's name")?;
        dtype_from_name(&name).ok_or_else(|| HeaderProblem::Dtype { tensor: tensor.to_owned(), dtype: name })
    }

    /// Reads a shape into `self.shape`.
    fn shape(&mut self, tensor: &str) -> Result<(), HeaderProblem> {
        self.shape.clear();
        self.open_list(tensor, "shape")?;
        let mut first = true;
        while self.scanner.next_member(b']', first)? {
            first = false;
            if self.shape.len() == self.limits.max_rank {
                return Err(HeaderProblem::Rank { tensor: tensor.to_owned(), limit: self.limits.max_rank });
            }
            let dimension = self.unsigned(tensor, "shape")?;
            if i64::try_from(dimension).is_err() {
                return Err(HeaderProblem::Dimension { tensor: tensor.to_owned(), dimension });
            }
            self.shape.push(dimension);
        }
        Ok(())
    }

    fn offsets(&mut self, tensor: &str) -> Result<std::ops::Range<u64>, HeaderProblem> {
        self.open_list(tensor, "data_offsets")?;
        let wrong = |more| HeaderProblem::OffsetCount { tensor: tensor.to_owned(), more };
        let mut found = [0; 2];
        let mut count = 0;
        while self.scanner.next_member(b']', count == 0)? {
            let offset = self.unsigned(tensor, "data_offsets")?;
            *found.get_mut(count).ok_or_else(|| wrong(true))? = offset;
            count += 1;
        }
        if count == found.len() { Ok(found[0]..found[1]) } else { Err(wrong(false)) }
    }

    fn open_list(&mut self, tensor: &str, field: &'static str) -> Result<(), HeaderProblem> {
        self.kind(Kind::List, tensor, field, "a list of integers")?;
        Ok(self.scanner.expect(b'[', "")?)
    }

    fn unsigned(&mut self, tensor: &str, field: &'static str) -> Result<u64, HeaderProblem> {
        self.kind(Kind::Number, tensor, field, "a list of integers only")?;
        let number = self.scanner.number()?;
        let wrong = |_| HeaderProblem::Number { tensor: tensor.to_owned(), field, number: number.to_owned() };
        number.parse().map_err(wrong)
    }

    /// Refuses a field whose value is not of the kind it must be.
    fn kind(
        &mut self,
        due: Kind,
        tensor: &str,
        field: &'static str,
        wanted: &'static str,
    ) -> Result<(), HeaderProblem> {
        let found = self.scanner.kind()?;
        if found == due {
            return Ok(());
        }
        Err(HeaderProblem::FieldKind { tensor: tensor.to_owned(), field, found: found.name(), wanted })
    }
}
