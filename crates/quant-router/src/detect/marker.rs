//! What a file says of one layer: the JSON in its `comfy_quant` tensor, and its entry in the metadata `_quantization_metadata`.

use serde_json::{Map, Value};

use super::header::{Header, inside, module};
use crate::error::{QuantError, Result};

/// The metadata key that describes layers.
const KEY: &str = "_quantization_metadata";
/// The tensor that describes its layer.
pub(super) const TENSOR: &str = "comfy_quant";
/// What files put before the names that their metadata uses.
const PREFIXES: [&str; 4] = ["model.diffusion_model.", "diffusion_model.", "model.", "transformer."];

/// What is said of a layer. All fields are what was said; nothing is made up for what was not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Marker {
    /// The format's name.
    pub format: Option<String>,
    /// Columns of the groups that inputs are rotated in. None: they are not.
    pub rotation: Option<u64>,
    /// Columns of the groups of a rotation, whether or not it is said that there is one.
    pub rotation_group: Option<u64>,
    /// Columns that share a scale.
    pub group: Option<u64>,
    /// Where it was said.
    pub source: String,
}

impl Marker {
    /// What is said of the layer with this weight. None if nothing is; a marker that is empty or all zero says nothing.
    ///
    /// An error if what is said cannot be read, or if the tensor and the metadata say different things.
    pub fn of(header: &Header<'_>, layers: &Layers, weight: &str) -> Result<Option<Self>> {
        let told = layers.of(weight)?;
        let Some(tensor) = header.get(&inside(module(weight), TENSOR)) else { return Ok(told) };
        let bytes = header.marker(weight, tensor)?;
        if bytes.iter().all(|&byte| byte == 0) {
            return Ok(told);
        }
        let refuse =
            |why: String| QuantError::Marker { layer: weight.into(), tensor: tensor.name.clone(), why };
        let text = std::str::from_utf8(&bytes).map_err(|_| refuse("it is no UTF-8".into()))?;
        // Writers pad it with zeros to a size of their own.
        let value: Value =
            serde_json::from_str(text.trim_end_matches('\0')).map_err(|e| refuse(e.to_string()))?;
        let Value::Object(fields) = value else { return Err(refuse("it is no JSON object".into())) };
        let marker = Self::read(&fields, &tensor.name).map_err(refuse)?;
        if let Some(told) = told
            && (told.format.is_some() && marker.format.is_some() && told.format != marker.format
                || told.rotation != marker.rotation
                || told.rotation_group != marker.rotation_group)
        {
            let says = |marker: &Self| {
                format!("{} with the rotation {:?}", marker.format.as_deref().unwrap_or("?"), marker.rotation)
            };
            return Err(QuantError::Contradiction {
                layer: weight.into(),
                says: format!("{} in {}", says(&told), told.source),
                found: format!("{} in {}", says(&marker), marker.source),
            });
        }
        Ok(Some(marker))
    }

    fn read(fields: &Map<String, Value>, source: &str) -> std::result::Result<Self, String> {
        let format = match fields.get("format") {
            None | Some(Value::Null) => None,
            Some(Value::String(format)) => Some(format.clone()),
            Some(other) => return Err(format!("its format is {other}, no text")),
        };
        let number = |key: &str| match fields.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_u64() {
                Some(number) => Ok(Some(number)),
                None => Err(format!("its {key} is {value}, no count")),
            },
        };
        let rotated = match fields.get("convrot") {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::Bool(true)) => true,
            Some(other) => return Err(format!("its convrot is {other}, neither true nor false")),
        };
        // 256 is what the format's writers take where they name no size.
        let rotation_group = number("convrot_groupsize")?;
        let rotation = if rotated { Some(rotation_group.unwrap_or(256)) } else { None };
        Ok(Self { format, rotation, rotation_group, group: number("group_size")?, source: source.into() })
    }
}

/// What the metadata says of layers.
#[derive(Debug, Default)]
pub struct Layers(Map<String, Value>);

impl Layers {
    /// Reads the metadata. An error if it is there and cannot be read.
    pub fn of_header(header: &Header<'_>) -> Result<Self> {
        let Some(text) = header.metadata().get(KEY) else { return Ok(Self::default()) };
        let refuse = |why: String| QuantError::Marker { layer: "*".into(), tensor: KEY.into(), why };
        match serde_json::from_str(text).map_err(|error| refuse(error.to_string()))? {
            Value::Object(mut fields) => match fields.remove("layers") {
                None | Some(Value::Null) => Ok(Self::default()),
                Some(Value::Object(layers)) => Ok(Self(layers)),
                Some(_) => Err(refuse("its layers are no JSON object".into())),
            },
            _ => Err(refuse("it is no JSON object".into())),
        }
    }

    /// The names that it speaks of.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// What it says of the layer with this weight, by the layer's whole name or by that without the prefix of the file.
    fn of(&self, weight: &str) -> Result<Option<Marker>> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let module = module(weight);
        let short = PREFIXES.iter().filter_map(|prefix| module.strip_prefix(prefix));
        let Some(value) = std::iter::once(module).chain(short).find_map(|name| self.0.get(name)) else {
            return Ok(None);
        };
        let refuse = |why: String| QuantError::Marker { layer: weight.into(), tensor: KEY.into(), why };
        let Value::Object(fields) = value else { return Err(refuse("it is no JSON object".into())) };
        Marker::read(fields, KEY).map(Some).map_err(refuse)
    }
}
