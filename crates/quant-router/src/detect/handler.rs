//! Who recognises quantized layers: one handler a format, ours and an application's own.

use std::cell::OnceCell;
use std::fmt;

use super::config::QuantConfig;
use super::header::{Header, is_fp8};
use super::marker::{Layers, Marker, TENSOR};
use super::quanto_map::QuantoMap;
use crate::error::{QuantError, Result};
use crate::weight::QuantWeight;

/// A format, as detection sees it.
///
/// Both methods see names, types, shapes and metadata only. Several handlers may recognise one weight: the one with the smallest
/// priority describes it, and among equals the one that was registered first.
pub trait Handler: fmt::Debug + Send + Sync {
    /// What it is called in reports.
    fn name(&self) -> &str;

    /// Smaller numbers go first.
    fn priority(&self) -> u32 {
        1000
    }

    /// The names of the weights that are of this format, or say that they are.
    fn detect(&self, evidence: &Evidence<'_>) -> Vec<String>;

    /// One of these weights. An error if it is of this format and cannot be understood: detection fails with it.
    fn describe(&self, evidence: &Evidence<'_>, weight: &str) -> Result<Described>;
}

/// A weight as its handler understands it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Described {
    /// The weight.
    pub weight: QuantWeight,
    /// Tensors that belong to the layer and are no parts of its weight: descriptions, and ranges of its inputs.
    pub hints: Vec<String>,
    /// What a user should know.
    pub notes: Vec<String>,
}

impl Described {
    /// A weight alone.
    pub fn new(weight: QuantWeight) -> Self {
        Self { weight, hints: Vec::new(), notes: Vec::new() }
    }
}

/// A header and what it says of its layers.
#[derive(Debug)]
pub struct Evidence<'a> {
    header: &'a Header<'a>,
    layers: Layers,
    map: QuantoMap,
    config: QuantConfig,
    scaled: OnceCell<Option<String>>,
    rotated: OnceCell<Option<String>>,
}

impl<'a> Evidence<'a> {
    /// Reads what the metadata says. An error if it cannot be read.
    pub fn new(header: &'a Header<'a>) -> Result<Self> {
        let (layers, map) = (Layers::of_header(header)?, QuantoMap::of_header(header)?);
        let config = QuantConfig::of_header(header)?;
        Ok(Self { header, layers, map, config, scaled: OnceCell::new(), rotated: OnceCell::new() })
    }

    /// The header.
    pub fn header(&self) -> &'a Header<'a> {
        self.header
    }

    /// What is said of the layer with this weight.
    pub fn marker(&self, weight: &str) -> Result<Option<Marker>> {
        Marker::of(self.header, &self.layers, weight)
    }

    /// What is said of a layer, which must be one of these formats if it names any.
    pub fn marker_of(&self, weight: &str, formats: &[&str], found: &str) -> Result<Option<Marker>> {
        let marker = self.marker(weight)?;
        if let Some(says) = marker.as_ref().and_then(|marker| marker.format.as_deref())
            && !formats.contains(&says)
        {
            let (layer, says, found) = (weight.into(), says.into(), found.into());
            return Err(QuantError::Contradiction { layer, says, found });
        }
        Ok(marker)
    }

    /// The type that the file's map of quantized modules gives a weight: `qint8`. None if it gives none.
    pub fn quanto(&self, weight: &str) -> Option<&str> {
        self.map.of(weight)
    }

    /// What the model's configuration says of its quantization, for a layer whose numbers depend on it. An error if it cannot be read.
    pub(super) fn config(&self, layer: &str) -> Result<&QuantConfig> {
        self.config.for_layer(layer)
    }

    /// What says that FP8 weights of this file have scales. None if nothing does.
    pub(super) fn fp8_is_scaled(&self) -> Option<&str> {
        let find = || {
            let marker = |name: &str| name == "scaled_fp8" || name.ends_with(".scaled_fp8");
            let named = self.header.tensors().find(|tensor| marker(&tensor.name));
            let scaled = || {
                let mut fp8 = self.header.tensors().filter(|tensor| is_fp8(tensor));
                fp8.find_map(|tensor| super::handlers::scales(self.header, &tensor.name).first().copied())
            };
            named.or_else(scaled).map(|tensor| tensor.name.clone())
        };
        self.scaled.get_or_init(find).as_deref()
    }

    /// A layer of this file that says that it is rotated. None if none does.
    pub(super) fn rotated(&self) -> Option<&str> {
        let find = || {
            let ending = format!(".{TENSOR}");
            let tensors = self.header.tensors().map(|tensor| tensor.name.as_str());
            let mut weights =
                tensors.filter_map(|name| Some(format!("{}.weight", name.strip_suffix(&ending)?)));
            weights.find(|weight| {
                self.marker(weight).ok().flatten().is_some_and(|marker| marker.rotation.is_some())
            })
        };
        self.rotated.get_or_init(find).as_deref()
    }
}
