//! The memory of Python's tensors as slices for the length of a call, and mapped files as tensors.
#![expect(unsafe_code, reason = "tensors come as an address and a size")]

use std::ops::Range;
use std::sync::Arc;

use checkpoint::FileMap;
use pyo3::prelude::*;
use weightstream::Bytes;

use super::{Device, capsule};
use crate::error::{Class, Failure};

/// A tensor of some bytes of a mapped file. It keeps the file mapped. What is written to it stays in this process.
pub(crate) fn mapped_capsule(
    py: Python<'_>,
    map: Arc<FileMap>,
    range: Range<u64>,
) -> PyResult<Bound<'_, PyAny>> {
    let size = range.end.saturating_sub(range.start);
    let Some(first) = map.pointer(range) else {
        return Err(Failure::new(Class::Internal, "these bytes are outside the mapped file").into());
    };
    let address = first.as_ptr().expose_provenance() as u64;
    // SAFETY: the pointer is good for `size` bytes, readable and writable, for as long as the map lives, which the
    // capsule holds. That the file is not cut meanwhile is what `FileMap` asks of whoever touches them.
    unsafe { capsule(py, address, Bytes(size), Device::HOST, Box::new(map)) }
}

/// The bytes of a tensor, to be read during one call.
///
/// The package passes a tensor's own address and size, and keeps the tensor and leaves it alone until the call returns.
pub(crate) fn bytes<'a>(address: u64, size: u64) -> &'a [u8] {
    if size == 0 {
        return &[];
    }
    // SAFETY: see above; the tensor is in CPU memory and of that size.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address as usize), size as usize) }
}

/// The bytes of a tensor, to be filled during one call.
///
/// The package passes the address and size of a tensor that it has just made and given to nobody, and keeps it until the
/// call returns.
pub(crate) fn bytes_mut<'a>(address: u64, size: u64) -> &'a mut [u8] {
    if size == 0 {
        return &mut [];
    }
    let first = std::ptr::with_exposed_provenance_mut(address as usize);
    // SAFETY: see above; nobody else has the tensor, and each is passed once.
    unsafe { std::slice::from_raw_parts_mut(first, size as usize) }
}

/// A number whose every bit pattern is one.
pub(crate) trait Number: Copy {}
impl Number for f32 {}
impl Number for half::bf16 {}
impl Number for half::f16 {}

/// The numbers of a tensor, to be filled during one call: as [`bytes_mut`], of which the address may not be aligned.
pub(crate) fn numbers_mut<'a, T: Number>(address: u64, size: u64) -> Result<&'a mut [T], Failure> {
    let width = size_of::<T>() as u64;
    if !address.is_multiple_of(align_of::<T>() as u64) || !size.is_multiple_of(width) {
        let text = format!("{size} bytes at {address:#x} are no array of numbers of {width} bytes");
        return Err(Failure::new(Class::Internal, text));
    }
    if size == 0 {
        return Ok(&mut []);
    }
    let first = std::ptr::with_exposed_provenance_mut(address as usize);
    // SAFETY: as for `bytes_mut`, and aligned; any bits are a number of these types.
    Ok(unsafe { std::slice::from_raw_parts_mut(first, (size / width) as usize) })
}
