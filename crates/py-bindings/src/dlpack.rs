//! One-dimensional byte tensors over memory that Rust owns, handed to PyTorch as DLPack capsules.
//!
//! Hand-written, since one shape of one type is all that is needed: PyTorch takes the plain (unversioned) capsule on
//! every version, and the view as bf16, f8 or int4 is made in Python. The crates that offer DLPack bring its whole
//! exporter protocol (stream, copy and version negotiation), none of which a raw capsule goes through.
//!
//! ```text
//!   PyCapsule "dltensor" ──► ManagedTensor { tensor ──► data, length   ; deleter ; context ─┐
//!                            length: [i64; 1], keep: the lease }  ◄── one Box ───────────────┘
//! ```
//!
//! The box is freed by the deleter, called once: by the tensor's storage when the last view of it is gone, or by the
//! capsule if nobody took the tensor out of it. Freeing it drops the lease, which is what keeps the addresses valid.
#![expect(unsafe_code, reason = "DLPack is a C structure passed by pointer")]

mod memory;

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;
use weightstream::{AddressSpace, Bytes, DeviceAddress, DeviceKind, HostBytes};

pub(crate) use memory::{bytes, bytes_mut, mapped_capsule, numbers_mut};

/// The name of a capsule whose tensor nobody has taken yet; the consumer renames it.
const UNUSED: &CStr = c"dltensor";

/// Where a tensor's memory is, as DLPack numbers devices.
#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    kind: i32,
    ordinal: i32,
}

impl Device {
    /// Host memory, which is also what the emulator's addresses are.
    const HOST: Self = Self { kind: 1, ordinal: 0 };

    /// The memory of a driver's device.
    const fn new(kind: DeviceKind, ordinal: u32) -> Self {
        match kind {
            DeviceKind::Cuda => Self { kind: 2, ordinal: ordinal.cast_signed() },
            DeviceKind::Host => Self::HOST,
        }
    }
}

#[repr(C)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// DLPack's `DLTensor`.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    dimensions: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// DLPack's `DLManagedTensor`, and behind it what it points to.
#[repr(C)]
struct ManagedTensor {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedTensor)>,
    length: [i64; 1],
    keep: Option<Box<dyn Any + Send + Sync>>,
}

/// A tensor of an address range, on the device of the range's driver. It keeps the range reserved.
pub(crate) fn device_capsule(
    py: Python<'_>,
    lease: Arc<AddressSpace>,
    address: DeviceAddress,
    size: Bytes,
) -> PyResult<Bound<'_, PyAny>> {
    let info = lease.driver().device_info();
    let device = Device::new(info.kind, info.ordinal.0);
    // SAFETY: the facade gives addresses inside the range only, and the range stays reserved and mapped while a lease
    // of it lives: closing the model puts a page of 0xFF behind it.
    unsafe { capsule(py, address.0, size, device, Box::new(lease)) }
}

/// A tensor of bytes that are kept in host memory. It keeps them alive.
pub(crate) fn host_capsule<'py>(py: Python<'py>, bytes: &HostBytes) -> PyResult<Bound<'py, PyAny>> {
    let address = bytes.address().expose_provenance() as u64;
    // SAFETY: the bytes live as long as `keep`. They are written by no one but the owner of the tensor, who is told
    // that a managed model's host bytes are for reading.
    unsafe { capsule(py, address, bytes.size(), Device::HOST, Box::new(Arc::clone(bytes.keep()))) }
}

/// The bytes of a tensor that `keep`, its Python storages, keeps alive.
pub(crate) fn host_bytes(address: u64, size: Bytes, keep: Py<PyAny>) -> HostBytes {
    let address = std::ptr::with_exposed_provenance(address as usize);
    // SAFETY: the package passes a tensor's own address and size together with the storages that hold it. PyO3 lets a
    // reference be dropped on any thread. The package guards the parameters against writes while it is attached.
    unsafe { HostBytes::new(address, size, Arc::new(keep)) }
}

/// A capsule of `size` bytes at `address` on `device`, for `torch.from_dlpack`. `keep` lives as long as the tensor.
///
/// # Safety
/// `address..address + size` stays readable and writable on `device` for as long as `keep` lives.
unsafe fn capsule(
    py: Python<'_>,
    address: u64,
    size: Bytes,
    device: Device,
    keep: Box<dyn Any + Send + Sync>,
) -> PyResult<Bound<'_, PyAny>> {
    let managed = Box::into_raw(Box::new(ManagedTensor {
        tensor: Tensor {
            data: std::ptr::with_exposed_provenance_mut(address as usize),
            device,
            dimensions: 1,
            dtype: DataType { code: 1, bits: 8, lanes: 1 },
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            byte_offset: 0,
        },
        context: std::ptr::null_mut(),
        deleter: Some(free),
        length: [size.0.cast_signed()],
        keep: Some(keep),
    }));
    // SAFETY: `managed` came from the line above and nobody else has it yet.
    let inside = unsafe { &mut *managed };
    inside.tensor.shape = inside.length.as_mut_ptr();
    // SAFETY: the name is static, the pointer is not null, and `free_unused` fits the capsule.
    let object = unsafe { ffi::PyCapsule_New(managed.cast(), UNUSED.as_ptr(), Some(free_unused)) };
    if object.is_null() {
        // SAFETY: no capsule was made, so this is the only owner.
        unsafe { free(managed) };
        return Err(PyErr::fetch(py));
    }
    // SAFETY: `object` is a new reference that nobody else owns.
    Ok(unsafe { Bound::from_owned_ptr(py, object) })
}

/// The deleter: may run on any thread, with or without the interpreter, and must not unwind into C.
unsafe extern "C" fn free(managed: *mut ManagedTensor) {
    if managed.is_null() {
        return;
    }
    // SAFETY: DLPack calls the deleter once, with the pointer that `capsule` made from a box.
    let owned = unsafe { Box::from_raw(managed) };
    let ManagedTensor { keep, .. } = *owned;
    if catch_unwind(AssertUnwindSafe(move || drop(keep))).is_err() {
        tracing::error!("giving back a tensor's memory panicked; it leaks");
    }
}

/// The capsule's own destructor: frees the tensor if nobody took it.
unsafe extern "C" fn free_unused(object: *mut ffi::PyObject) {
    // SAFETY: Python calls this with the capsule; the check does not touch the error state.
    if unsafe { ffi::PyCapsule_IsValid(object, UNUSED.as_ptr()) } == 0 {
        return;
    }
    // SAFETY: the capsule is valid under this name, so it holds the pointer that `capsule` gave it.
    let managed = unsafe { ffi::PyCapsule_GetPointer(object, UNUSED.as_ptr()) };
    // SAFETY: unused means that the deleter has not run.
    unsafe { free(managed.cast()) };
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]
    use std::sync::Arc;

    use super::*;

    #[test]
    fn an_unused_capsule_frees_its_lease_once() {
        Python::initialize();
        let memory = Arc::new([7u8; 16]);
        let address = memory.as_ptr().expose_provenance() as u64;
        Python::attach(|py| {
            // SAFETY: the array lives in the lease.
            let made =
                unsafe { capsule(py, address, Bytes(16), Device::HOST, Box::new(Arc::clone(&memory))) };
            assert_eq!(Arc::strong_count(&memory), 2);
            drop(made.unwrap());
        });
        assert_eq!(Arc::strong_count(&memory), 1);
    }

    #[test]
    fn a_taken_tensor_is_freed_by_its_deleter_and_not_by_the_capsule() {
        Python::initialize();
        let memory = Arc::new([7u8; 16]);
        let address = memory.as_ptr().expose_provenance() as u64;
        Python::attach(|py| {
            // SAFETY: the array lives in the lease.
            let made =
                unsafe { capsule(py, address, Bytes(16), Device::HOST, Box::new(Arc::clone(&memory))) }
                    .unwrap();
            // SAFETY: a capsule of this name holds a managed tensor.
            let taken =
                unsafe { ffi::PyCapsule_GetPointer(made.as_ptr(), UNUSED.as_ptr()) }.cast::<ManagedTensor>();
            // SAFETY: the name is static; this is how a consumer marks the tensor as taken.
            unsafe { ffi::PyCapsule_SetName(made.as_ptr(), c"used_dltensor".as_ptr()) };
            drop(made);
            assert_eq!(Arc::strong_count(&memory), 2, "the capsule must not free what was taken");
            // SAFETY: taken above and not freed since.
            let deleter = unsafe { (*taken).deleter }.unwrap();
            // SAFETY: the consumer's one call of the deleter.
            unsafe { deleter(taken) };
        });
        assert_eq!(Arc::strong_count(&memory), 1);
    }
}
