//! Which weights of a model are quantized, and how: decided tensor by tensor, on names, types, shapes and metadata.

mod config;
mod handler;
mod handlers;
mod header;
mod leftover;
mod marker;
mod quanto_map;

use std::collections::{BTreeMap, BTreeSet};

use checkpoint::Checkpoint;

pub use handler::{Described, Evidence, Handler};
pub use header::{Header, Read};
pub use marker::{Layers, Marker};

use crate::error::{QuantError, Result};
use crate::weight::QuantWeight;

/// Handlers by priority.
#[derive(Debug)]
pub struct Handlers {
    /// In the order in which they are asked.
    sorted: Vec<Box<dyn Handler>>,
}

impl Default for Handlers {
    /// The formats that this crate knows.
    fn default() -> Self {
        let mut handlers = Self::none();
        for handler in handlers::builtin() {
            handlers.add(handler);
        }
        handlers
    }
}

impl Handlers {
    /// No handler at all.
    pub fn none() -> Self {
        Self { sorted: Vec::new() }
    }

    /// Adds one, behind those of the same priority.
    pub fn add(&mut self, handler: Box<dyn Handler>) {
        let at = self.sorted.partition_point(|other| other.priority() <= handler.priority());
        self.sorted.insert(at, handler);
    }

    /// Takes away those of this name. Whether there was one.
    pub fn remove(&mut self, name: &str) -> bool {
        let before = self.sorted.len();
        self.sorted.retain(|handler| handler.name() != name);
        self.sorted.len() < before
    }

    /// Their names, in the order in which they are asked.
    pub fn names(&self) -> Vec<&str> {
        self.sorted.iter().map(|handler| handler.name()).collect()
    }

    /// Finds the quantized weights of a model. An error names the first layer, in the order of their names, that says it is
    /// quantized and is not understood.
    pub fn detect(&self, header: &Header<'_>) -> Result<Detection> {
        let evidence = Evidence::new(header)?;
        let mut claims = BTreeMap::new();
        for handler in &self.sorted {
            for weight in handler.detect(&evidence) {
                claims.entry(weight).or_insert(handler);
            }
        }
        let mut detection = Detection::default();
        let mut owned = BTreeSet::new();
        for (name, handler) in claims {
            let described = handler.describe(&evidence, &name)?;
            for part in &described.weight.parts {
                if !owned.insert(part.tensor.clone()) {
                    return Err(QuantError::NotUnderstood {
                        layer: name,
                        tensor: part.tensor.clone(),
                        why: "another weight has this tensor already".into(),
                    });
                }
            }
            detection.hints.extend(described.hints);
            detection.notes.extend(described.notes.into_iter().map(|note| format!("{name:?}: {note}")));
            let weight = described.weight;
            detection.weights.insert(name, Found { weight, handler: handler.name().to_owned() });
        }
        detection.hints.retain(|hint| !owned.contains(hint));
        owned.extend(detection.hints.iter().cloned());
        leftover::sort(&evidence, &owned, &mut detection)?;
        Ok(detection)
    }

    /// Their names and priorities, in that order.
    pub fn priorities(&self) -> impl Iterator<Item = (&str, u32)> {
        self.sorted.iter().map(|handler| (handler.name(), handler.priority()))
    }

    /// The weights that handlers recognise, each with the name and priority of the one that takes it. Nothing is described, so that
    /// what cannot be understood is no error yet.
    pub fn claims(&self, header: &Header<'_>) -> Result<BTreeMap<String, (String, u32)>> {
        let evidence = Evidence::new(header)?;
        let mut claims = BTreeMap::new();
        for handler in &self.sorted {
            for weight in handler.detect(&evidence) {
                claims.entry(weight).or_insert_with(|| (handler.name().to_owned(), handler.priority()));
            }
        }
        Ok(claims)
    }

    /// Finds the quantized weights of an open model.
    pub fn detect_in(&self, model: &Checkpoint) -> Result<Detection> {
        let read = |tensor: &checkpoint::TensorInfo| header::read(model, tensor);
        self.detect(&Header::new(model.tensors(), model.metadata(), &read))
    }
}

/// A quantized weight, and who recognised it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The weight.
    pub weight: QuantWeight,
    /// The handler's name.
    pub handler: String,
}

/// What a model holds. Every tensor of it is in exactly one place: a part of a weight, a hint, or plain.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Detection {
    /// The quantized weights, by name.
    pub weights: BTreeMap<String, Found>,
    /// Tensors that belong to quantized layers and are no part of their weights' numbers.
    pub hints: BTreeSet<String>,
    /// All other tensors, to be used as they are.
    pub plain: BTreeSet<String>,
    /// What a user should know.
    pub notes: Vec<String>,
}
