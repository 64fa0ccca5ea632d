//! Where everything goes in a file to be written: order, offsets, the header's bytes. Pure: no file is touched.

use std::collections::{BTreeMap, HashSet};
use std::iter;
use std::path::Path;

use ::safetensors::Dtype;

use super::WriteProblem;
use crate::safetensors::read_header;
use crate::{CheckpointError, Limits, Result};

/// The longest header that readers of the format accept.
const MAX_HEADER: u64 = 100_000_000;
/// No data is larger than this: what `off_t` holds, less room for a header.
const MAX_DATA: u64 = i64::MAX as u64 - 2 * MAX_HEADER;
/// The largest alignment; what devices for direct reading ask for is 512 to 4096.
const MAX_ALIGNMENT: u64 = 1 << 20;
/// The key of the metadata in a header.
const METADATA: &str = "__metadata__";
/// What readers expect there of a file for PyTorch.
const FORMAT: (&str, &str) = ("format", "pt");

/// A tensor to be written, without its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its dimensions, slowest first.
    pub shape: Vec<u64>,
}

/// In which order tensors lie in the file. The format allows no gaps, so that order alone decides where each starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Order {
    /// As the official library writes: types of large elements first, then by name.
    #[default]
    Official,
    /// Tensors whose size is a multiple of the alignment first, so that each of them starts at one; then the others,
    /// those with more factors of two in their size first. Types and names decide what remains. For weights that will be
    /// read past the page cache straight into place.
    Aligned,
}

/// A file to be written.
#[derive(Debug)]
pub(super) struct Plan {
    /// The length, the JSON and the spaces after it.
    pub(super) header: Vec<u8>,
    /// Where each tensor starts and how many bytes it has, by the number it was announced under.
    pub(super) places: Vec<Place>,
    /// The numbers in the order of the bytes.
    pub(super) order: Vec<usize>,
    /// Bytes of the whole file.
    pub(super) size: u64,
}

/// Where one tensor goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// From the file's start.
    pub(super) start: u64,
    pub(super) bytes: u64,
}

impl Plan {
    /// Lays a file out. `path` is for errors.
    pub(super) fn new(
        path: &Path,
        specs: &[TensorSpec],
        metadata: &BTreeMap<String, String>,
        alignment: u64,
        order: Order,
    ) -> Result<Self> {
        Self::lay_out(specs, metadata, alignment, order).and_then(|plan| plan.read_back(path)).map_err(
            |problem| CheckpointError::Unwritable { path: path.to_owned(), problem: Box::new(problem) },
        )
    }

    fn lay_out(
        specs: &[TensorSpec],
        metadata: &BTreeMap<String, String>,
        alignment: u64,
        order: Order,
    ) -> Result<Self, WriteProblem> {
        if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
            return Err(WriteProblem::Alignment { alignment, limit: MAX_ALIGNMENT });
        }
        check_names(specs)?;
        let bytes = specs.iter().map(size).collect::<Result<Vec<_>, _>>()?;
        let order = sorted(specs, &bytes, alignment, order);
        let mut places = vec![Place { start: 0, bytes: 0 }; specs.len()];
        let mut end = 0_u64;
        for &index in &order {
            places[index] = Place { start: end, bytes: bytes[index] };
            end = end
                .checked_add(bytes[index])
                .filter(|end| *end <= MAX_DATA)
                .ok_or(WriteProblem::TotalOverflow)?;
        }
        let mut header = header(specs, &places, &order, metadata);
        // At least 8, as the official library pads.
        let data_start = header.len().next_multiple_of(alignment.max(8) as usize);
        header.resize(data_start, b' ');
        let length = (data_start - 8) as u64;
        if length > MAX_HEADER {
            return Err(WriteProblem::HeaderTooLong { bytes: length, limit: MAX_HEADER });
        }
        header[..8].copy_from_slice(&length.to_le_bytes());
        for place in &mut places {
            place.start += data_start as u64;
        }
        Ok(Self { header, places, order, size: data_start as u64 + end })
    }

    /// Refuses a file that would not be accepted when read.
    fn read_back(self, path: &Path) -> Result<Self, WriteProblem> {
        match read_header(&self.header[..], self.size, path, &Limits::default(), false) {
            Err(CheckpointError::Header { problem, .. }) => Err(WriteProblem::NotReadable(*problem)),
            // Bytes in memory cannot fail to be read, and they begin with a length.
            _ => Ok(self),
        }
    }
}

fn check_names(specs: &[TensorSpec]) -> Result<(), WriteProblem> {
    let mut seen = HashSet::with_capacity(specs.len());
    for spec in specs {
        if spec.name == METADATA {
            return Err(WriteProblem::ReservedName);
        }
        if !seen.insert(spec.name.as_str()) {
            return Err(WriteProblem::DuplicateTensor { tensor: spec.name.clone() });
        }
    }
    Ok(())
}

/// Bytes of a tensor. Dimensions are multiplied as readers multiply them, zeros included.
fn size(spec: &TensorSpec) -> Result<u64, WriteProblem> {
    let (tensor, dtype, shape) = (|| spec.name.clone(), spec.dtype, || spec.shape.clone());
    let elements = spec.shape.iter().try_fold(1_u64, |product, &dim| product.checked_mul(dim));
    let bits = elements.and_then(|elements| elements.checked_mul(dtype.bitsize() as u64));
    match bits {
        None => Err(WriteProblem::Overflow { tensor: tensor(), dtype, shape: shape() }),
        Some(bits) if bits % 8 != 0 => {
            Err(WriteProblem::PartialByte { tensor: tensor(), dtype, shape: shape(), bits })
        }
        Some(bits) => Ok(bits / 8),
    }
}

/// The numbers of the tensors in the order in which their bytes lie.
fn sorted(specs: &[TensorSpec], bytes: &[u64], alignment: u64, order: Order) -> Vec<usize> {
    let factors = |index: usize| match order {
        Order::Official => 0,
        Order::Aligned => bytes[index].trailing_zeros().min(alignment.trailing_zeros()),
    };
    let mut numbers: Vec<_> = (0..specs.len()).collect();
    numbers.sort_by(|&a, &b| {
        let by_type = || specs[b].dtype.cmp(&specs[a].dtype);
        factors(b).cmp(&factors(a)).then_with(by_type).then_with(|| specs[a].name.cmp(&specs[b].name))
    });
    numbers
}

/// Eight bytes for the length, then the JSON: metadata first, tensors as they lie.
fn header(
    specs: &[TensorSpec],
    places: &[Place],
    order: &[usize],
    metadata: &BTreeMap<String, String>,
) -> Vec<u8> {
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let mut entries = metadata.clone();
    entries.entry(FORMAT.0.to_owned()).or_insert_with(|| FORMAT.1.to_owned());
    let pairs: Vec<_> =
        entries.iter().map(|(key, value)| format!("{}:{}", quoted(key), quoted(value))).collect();
    let metadata = format!("\"{METADATA}\":{{{}}}", pairs.join(","));
    let tensors = order.iter().map(|&index| {
        let (spec, place) = (&specs[index], places[index]);
        let shape: Vec<_> = spec.shape.iter().map(u64::to_string).collect();
        format!(
            "{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
            quoted(&spec.name),
            spec.dtype,
            shape.join(","),
            place.start,
            place.start + place.bytes
        )
    });
    let fields: Vec<_> = iter::once(metadata).chain(tensors).collect();
    format!("\0\0\0\0\0\0\0\0{{{}}}", fields.join(",")).into_bytes()
}
