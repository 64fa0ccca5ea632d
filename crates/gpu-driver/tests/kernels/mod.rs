//! A kernel that any device runs, loaded and launched the same way on a GPU and on the fake library.
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(unsafe_code, clippy::multiple_unsafe_ops_per_block, reason = "tests drive the unsafe verbs")]

use std::ffi::CStr;

use gpu_driver::{CudaDriver, DriverError, HostToDevice, KernelArgument, LaunchGrid};

use crate::conformance::{HostBuffer, Mapped};

/// `copy_one(target, source)`: one thread copies one `u32`.
const COPY_ONE: &CStr = c".version 7.0
.target sm_75
.address_size 64
.visible .entry copy_one(.param .u64 target, .param .u64 source)
{
    .reg .u64 %address<4>;
    .reg .u32 %value;
    ld.param.u64 %address0, [target];
    ld.param.u64 %address1, [source];
    cvta.to.global.u64 %address2, %address0;
    cvta.to.global.u64 %address3, %address1;
    ld.global.u32 %value, [%address3];
    st.global.u32 [%address2], %value;
    ret;
}
";

/// A launched kernel does its work in stream order; what is not a kernel is refused.
pub(crate) fn kernels_run_in_stream_order(driver: &CudaDriver) {
    use gpu_driver::Driver;
    let mapped = Mapped::new(driver, 1, 1);
    let mut host = HostBuffer::pattern(HostBuffer::PAGE, 9);
    let word = host.bytes()[..4].to_vec();
    let stream = driver.create_stream().unwrap();
    let (target, source) = (mapped.at(0).offset(gpu_driver::Bytes(64)), mapped.at(0));
    let arguments = [KernelArgument::Address(target), KernelArgument::Address(source)];
    // SAFETY: the text is PTX, the arguments are the kernel's, everything outlives the synchronize.
    unsafe {
        let kernel = driver.load_kernel(COPY_ONE, c"copy_one").unwrap();
        let copy = HostToDevice { target: source, source: host.start, size: gpu_driver::Bytes(4) };
        driver.copy_to_device(&[copy], stream).unwrap();
        kernel.launch(LaunchGrid::linear(1, 1), &arguments, stream).unwrap();
        driver.copy_to_host(host.start.wrapping_add(8), target, gpu_driver::Bytes(4), stream).unwrap();
        driver.synchronize_stream(stream).unwrap();
        let nothing = kernel.launch(LaunchGrid::linear(0, 1), &arguments, stream).unwrap_err();
        assert!(matches!(nothing, DriverError::InvalidArgument { .. }), "{nothing}");
        let unknown = driver.load_kernel(COPY_ONE, c"copy_two").unwrap_err();
        assert!(unknown.to_string().contains("copy_two"), "{unknown}");
        assert!(driver.load_kernel(c"this is no module", c"copy_one").is_err());
        driver.destroy_stream(stream).unwrap();
    }
    assert_eq!(host.bytes_mut()[8..12], word);
}
