//! Whole differences to weights, bare parameters and biases.

use super::{Adapter, Cut, Made, Parts, Shape, mismatch, refuse};
use crate::file::AdapterTensor;
use crate::key::Role;
use crate::layers::LayerKind;
use crate::plan::AdapterKind;

fn made(kind: AdapterKind, tensor: &AdapterTensor) -> Adapter<'_> {
    let parts = Parts::from([(Role::Diff, tensor)]);
    Adapter::new(kind, parts, Cut::Parts(&[Role::Diff]))
}

pub(super) fn weight<'a>(diff: &'a AdapterTensor, layer: &Shape) -> Made<Adapter<'a>> {
    if layer.kind == LayerKind::LinearTransposed {
        // As the layer keeps its weight, which is what the difference of two such weights is.
        let wanted: Vec<u64> = layer.dims.iter().rev().copied().collect();
        let cut = Cut::Never("the rows of its difference are the layer's inputs");
        return if diff.shape == wanted {
            Ok(Adapter { cut, ..made(AdapterKind::Diff, diff) })
        } else {
            mismatch(diff, &wanted, layer)
        };
    }
    if diff.shape == layer.dims {
        Ok(made(AdapterKind::Diff, diff))
    } else {
        mismatch(diff, &layer.dims, layer)
    }
}

pub(super) fn bias<'a>(diff: &'a AdapterTensor, layer: &Shape) -> Made<Adapter<'a>> {
    if !layer.bias {
        return refuse("it changes the bias of a layer that has none");
    }
    if diff.shape[..] == [layer.rows()] {
        Ok(made(AdapterKind::DiffBias, diff))
    } else {
        mismatch(diff, &[layer.rows()], layer)
    }
}
