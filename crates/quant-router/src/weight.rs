//! A quantized weight as a file holds it: its logical shape, how it is packed, and which tensors are its parts. Plain data,
//! made from names, types and shapes; no tensor is read for it.

use std::fmt;

use checkpoint::gguf::GgmlType;
use checkpoint::safetensors::dtype_from_name;
use checkpoint::{TensorInfo, TensorType};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{QuantError, Result};
use crate::formats::nunchaku::AWQ_GROUP;
use crate::formats::{Bnb4, PackedInt, QuantoBits, Scaled, Svdq, W4A8};

/// How a weight is packed.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[non_exhaustive]
pub enum Format {
    /// Blocks of ggml, which hold their scales: one part.
    Ggml(#[serde(serialize_with = "as_text", deserialize_with = "ggml_type")] GgmlType),
    /// Packed numbers times a scale of their tensor, row or block, which is a part of its own.
    Scaled(Scaled),
    /// Indexes of 4 bits, as bitsandbytes packs them.
    Bnb4(Bnb4),
    /// Numbers of 4 or 2 bits, as optimum-quanto packs them.
    QuantoBits(QuantoBits),
    /// Numbers in words, as GPTQ and AWQ pack them.
    PackedInt(PackedInt),
    /// Numbers of 4 bits that stand for INT8 ones.
    W4A8(W4A8),
    /// `SVDQuant`, as Nunchaku packs it.
    Svdq(Svdq),
    /// AWQ, as Nunchaku packs it: numbers of 4 bits times the scale of their 64 columns, plus [`PartRole::ZeroPoint`].
    NunchakuAwq,
}

impl Format {
    /// The elements that share a scale, as rows × columns of the logical matrix; `u64::MAX` for all there are.
    pub fn block(&self) -> [u64; 2] {
        match self {
            Self::Ggml(kind) => [1, kind.block_elements()],
            Self::Scaled(scaled) => scaled.block(),
            Self::Bnb4(format) => [1, format.block],
            Self::QuantoBits(format) => [1, format.group],
            Self::PackedInt(format) => [1, format.group],
            Self::W4A8(format) => [1, format.group],
            Self::Svdq(format) => [1, format.group()],
            Self::NunchakuAwq => [1, AWQ_GROUP],
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ggml(kind) => write!(f, "{kind}"),
            Self::Scaled(scaled) => write!(f, "{scaled}"),
            Self::Bnb4(format) => write!(f, "{format}"),
            Self::QuantoBits(format) => write!(f, "{format}"),
            Self::PackedInt(format) => write!(f, "{format}"),
            Self::W4A8(format) => write!(f, "{format}"),
            Self::Svdq(format) => write!(f, "{format}"),
            Self::NunchakuAwq => write!(f, "AWQ with a scale and a shift for {AWQ_GROUP}"),
        }
    }
}

/// What a part is to its weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize)]
#[non_exhaustive]
pub enum PartRole {
    /// The packed numbers.
    Data,
    /// What they are multiplied with, by block, row or tensor.
    Scale,
    /// What scales are multiplied with in turn.
    GlobalScale,
    /// What makes packed numbers of a group those of their row.
    GroupScale,
    /// What all numbers of a row are multiplied with besides the scale.
    RowScale,
    /// What packed numbers are divided by, by column, since inputs were multiplied with it.
    Smooth,
    /// What is subtracted from packed numbers.
    ZeroPoint,
    /// Which group a column is in.
    GroupIndex,
    /// The numbers that packed ones are indexes of.
    Codebook,
    /// The numbers that packed scales are indexes of.
    ScaleCodebook,
    /// What inputs were divided by when they were quantized. Not part of the weight's numbers.
    InputScale,
    /// What inputs are multiplied with, by column.
    InputFactor,
    /// The first of two narrow matrices that are added.
    LowRankDown,
    /// The second of them.
    LowRankUp,
    /// What is added to the numbers.
    Correction,
}

impl fmt::Display for PartRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Data => "packed data",
            Self::Scale => "scale",
            Self::GlobalScale => "global scale",
            Self::GroupScale => "group scale",
            Self::RowScale => "row scale",
            Self::Smooth => "smoothing factor",
            Self::ZeroPoint => "zero point",
            Self::GroupIndex => "index of groups",
            Self::Codebook => "codebook",
            Self::ScaleCodebook => "codebook of scales",
            Self::InputScale => "input scale",
            Self::InputFactor => "input factor",
            Self::LowRankDown => "low-rank down part",
            Self::LowRankUp => "low-rank up part",
            Self::Correction => "correction",
        })
    }
}

/// One tensor of a weight.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub struct Part {
    /// What it is to the weight.
    pub role: PartRole,
    /// The tensor's name in the file.
    pub tensor: String,
    /// How its elements are stored.
    #[serde(serialize_with = "as_text", deserialize_with = "tensor_type")]
    pub kind: TensorType,
    /// Its shape as stored, slowest dimension first.
    pub shape: Vec<u64>,
}

impl Part {
    /// A tensor of a file, as a part.
    pub fn of(role: PartRole, tensor: &TensorInfo) -> Self {
        Self { role, tensor: tensor.name.clone(), kind: tensor.kind, shape: tensor.shape.clone() }
    }
}

/// What is done to a layer's inputs before its weight meets them.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[non_exhaustive]
pub enum Transform {
    /// A normalized Hadamard matrix, on groups of so many columns.
    Hadamard {
        /// Columns of a group.
        group: u64,
    },
    /// Multiplied by column with the part [`PartRole::InputFactor`].
    Multiply,
}

/// A quantized weight.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub struct QuantWeight {
    /// The name of the weight that a model without quantization would have: `layers.0.attn.weight`.
    pub name: String,
    /// Its logical shape, slowest dimension first.
    pub shape: Vec<u64>,
    /// How it is packed.
    pub format: Format,
    /// Its tensors, one a role.
    pub parts: Vec<Part>,
    /// What happens to inputs first, in order. The weight's own numbers are those that transformed inputs meet.
    pub transforms: Vec<Transform>,
}

impl QuantWeight {
    /// A tensor of a GGUF file, whose blocks hold all there is.
    pub fn ggml(tensor: &TensorInfo) -> Result<Self> {
        match tensor.kind {
            TensorType::Ggml(kind) if kind.is_quantized() => Ok(Self {
                name: tensor.name.clone(),
                shape: tensor.shape.clone(),
                format: Format::Ggml(kind),
                parts: vec![Part::of(PartRole::Data, tensor)],
                transforms: Vec::new(),
            }),
            kind => Err(QuantError::NotQuantized { layer: tensor.name.clone(), kind: kind.to_string() }),
        }
    }

    /// The same weight in the shape that a model gives it. Only formats whose blocks follow each other through the whole weight can
    /// be reshaped; files of quanto do not say a weight's shape, and it is described by rows of one group.
    pub fn with_shape(mut self, shape: &[u64]) -> Result<Self> {
        let before = self.elements()?;
        let flat = matches!(self.format, Format::Bnb4(_) | Format::QuantoBits(_));
        let old = std::mem::replace(&mut self.shape, shape.to_vec());
        if old == shape {
            return Ok(self);
        }
        if !flat || self.elements()? != before {
            return Err(self.bad_shape("the file has it in another"));
        }
        Ok(self)
    }

    /// The part with this role.
    pub fn part(&self, role: PartRole) -> Option<&Part> {
        self.parts.iter().find(|part| part.role == role)
    }

    /// The part with this role, which the format needs.
    pub fn needs(&self, role: PartRole) -> Result<&Part> {
        self.part(role).ok_or_else(|| QuantError::NoPart {
            layer: self.name.clone(),
            format: self.format.to_string(),
            role,
        })
    }

    /// Rows of the logical matrix: all dimensions but the last. A scalar has one.
    pub fn rows(&self) -> Result<u64> {
        let (_, leading) = self.shape.split_last().unwrap_or((&1, &[]));
        self.product(leading)
    }

    /// Elements of a row: the last dimension.
    pub fn columns(&self) -> u64 {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Elements in all.
    pub fn elements(&self) -> Result<u64> {
        self.product(&self.shape)
    }

    /// A refusal of its shape.
    pub(crate) fn bad_shape(&self, why: &'static str) -> QuantError {
        QuantError::Shape {
            layer: self.name.clone(),
            shape: self.shape.clone(),
            format: self.format.to_string(),
            why,
        }
    }

    fn product(&self, dimensions: &[u64]) -> Result<u64> {
        // A zero anywhere makes it empty, whatever the others are.
        if dimensions.contains(&0) {
            return Ok(0);
        }
        let product = dimensions.iter().try_fold(1_u64, |product, &next| product.checked_mul(next));
        product.ok_or_else(|| self.bad_shape("it has more than 2^64 elements"))
    }
}

/// Serializes what prints as its format spells it.
fn as_text<S: Serializer>(value: &impl fmt::Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

/// A type of ggml by its name.
fn ggml_type<'de, D: Deserializer<'de>>(deserializer: D) -> Result<GgmlType, D::Error> {
    let name = String::deserialize(deserializer)?;
    let found = GgmlType::all().find(|kind| kind.name() == name);
    found.ok_or_else(|| D::Error::custom(format!("{name:?} is no type of ggml")))
}

/// A type of elements by the name that it prints as.
fn tensor_type<'de, D: Deserializer<'de>>(deserializer: D) -> Result<TensorType, D::Error> {
    let name = String::deserialize(deserializer)?;
    kind_from_name(&name).ok_or_else(|| D::Error::custom(format!("{name:?} is no type of tensors")))
}

/// The type of elements that prints as this: `F8_E4M3`, or `Q4_K`.
pub fn kind_from_name(name: &str) -> Option<TensorType> {
    let plain = dtype_from_name(name).map(TensorType::Plain);
    plain.or_else(|| GgmlType::all().find(|kind| kind.name() == name).map(TensorType::Ggml))
}
