//! Where in a model a file's layer lies, and the pieces of layers that this comes down to.

use std::ops::Range;

use super::kin::Share;
use crate::kinds::{Made, Shape, Trouble, refuse};
use crate::layers::Layers;

/// Where a file's layer lies. Equal places are one layer, however they were spelled.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    /// It is a layer.
    Whole(usize),
    /// It is a layer, of which the model keeps the second half of the rows first.
    Swapped(usize),
    /// It is several layers under each other.
    Several {
        /// The layers, in the order of their rows.
        layers: Vec<usize>,
        /// Rows of each, if the caller said so.
        sizes: Option<Vec<u64>>,
    },
    /// It is some rows of a layer.
    Within {
        /// The layer.
        layer: usize,
        /// Which of its parts.
        number: usize,
        /// Of how many.
        count: usize,
        /// Rows of each part, if the caller said so.
        sizes: Option<Vec<u64>>,
        /// What is known of them otherwise.
        share: Share,
    },
}

/// Rows of a layer, and the rows of a file's layer that they get; `None` for all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) layer: usize,
    pub(crate) to: Option<Range<u64>>,
    pub(crate) from: Option<Range<u64>>,
}

impl Place {
    /// The shape of the file's layer and the pieces it becomes. `within` are the rows of a part of a layer, where it is one.
    pub(crate) fn pieces(&self, layers: &Layers, within: Option<Range<u64>>) -> Made<(Shape, Vec<Piece>)> {
        match self {
            Self::Whole(layer) => {
                Ok((shape_of(layers, *layer), vec![Piece { layer: *layer, to: None, from: None }]))
            }
            Self::Swapped(layer) => {
                let shape = shape_of(layers, *layer);
                let (half, all) = (shape.rows() / 2, shape.rows());
                if half * 2 != all {
                    return refuse(format!("the rows of {:?} are no two halves", layers.get(*layer).name));
                }
                let piece = |to: Range<u64>, from| Piece { layer: *layer, to: Some(to), from: Some(from) };
                Ok((shape, vec![piece(0..half, half..all), piece(half..all, 0..half)]))
            }
            Self::Several { layers: numbers, sizes } => several(layers, numbers, sizes.as_deref()),
            Self::Within { layer, .. } => {
                let Some(rows) = within else {
                    return Err(Trouble::Mismatch(format!(
                        "it is a part of {:?}, and nothing tells which rows; give their numbers in split_linear_modules_map",
                        layers.get(*layer).name
                    )));
                };
                let mut shape = shape_of(layers, *layer);
                if let Some(first) = shape.dims.first_mut() {
                    *first = rows.end - rows.start;
                }
                Ok((shape, vec![Piece { layer: *layer, to: Some(rows), from: None }]))
            }
        }
    }
}

fn shape_of(layers: &Layers, number: usize) -> Shape {
    let layer = layers.get(number);
    Shape { kind: layer.kind, dims: layer.shape.clone(), bias: layer.bias }
}

/// Several layers under each other.
fn several(layers: &Layers, numbers: &[usize], sizes: Option<&[u64]>) -> Made<(Shape, Vec<Piece>)> {
    let Some(first) = numbers.first() else { return refuse("a fused layer without parts") };
    let mut whole = shape_of(layers, *first);
    let (mut rows, mut pieces) = (0_u64, Vec::new());
    for (place, number) in numbers.iter().enumerate() {
        let part = shape_of(layers, *number);
        let name = &layers.get(*number).name;
        if part.inner() != whole.inner() || part.kind != whole.kind {
            return refuse(format!(
                "{:?} and {name:?} cannot be parts of one layer: their inputs differ",
                layers.get(*first).name
            ));
        }
        if let Some(size) = sizes.and_then(|sizes| sizes.get(place)).filter(|size| **size != part.rows()) {
            return Err(Trouble::Mismatch(format!(
                "split_linear_modules_map gives {name:?} {size} rows, and it has {}",
                part.rows()
            )));
        }
        let Some(end) = rows.checked_add(part.rows()) else {
            return refuse("its parts have more rows than can be counted");
        };
        whole.bias &= part.bias;
        pieces.push(Piece { layer: *number, to: None, from: Some(rows..end) });
        rows = end;
    }
    if let Some(first) = whole.dims.first_mut() {
        *first = rows;
    }
    Ok((whole, pieces))
}

impl Place {
    /// The layers by name, for messages.
    pub(crate) fn describe(&self, layers: &Layers) -> String {
        let name = |number: &usize| format!("{:?}", layers.get(*number).name);
        match self {
            Self::Whole(layer) | Self::Swapped(layer) => name(layer),
            Self::Several { layers: numbers, .. } => {
                numbers.iter().map(name).collect::<Vec<_>>().join(" with ")
            }
            Self::Within { layer, number, .. } => format!("part {number} of {}", name(layer)),
        }
    }
}
