//! Kernels: a device runs them in stream order, or says for every verb that it runs none.

use std::ffi::CStr;

use gpu_driver::{
    Bytes, DeviceKind, Driver, DriverError, HostToDevice, KernelArgument, KernelHandle, LaunchGrid,
    ModuleHandle, StreamHandle,
};

use super::Check;
use super::rig::{HostBuffer, Mapped};

pub(crate) const CHECKS: &[Check] = &[
    ("kernels_run_in_stream_order_or_not_at_all", kernels_run_in_stream_order_or_not_at_all),
    ("what_is_no_module_for_this_device_is_refused", what_is_no_module_for_this_device_is_refused),
];

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

fn kernels_run_in_stream_order_or_not_at_all(driver: &dyn Driver) {
    // SAFETY: the text is PTX.
    let module = match unsafe { driver.load_module(COPY_ONE) } {
        Err(refusal) if driver.device_info().kind == DeviceKind::Host => return runs_none(driver, &refusal),
        loaded => loaded.unwrap(),
    };
    let mapped = Mapped::new(driver, 1, 1);
    let mut host = HostBuffer::pattern(HostBuffer::PAGE, 9);
    let words = host.bytes()[..4].to_vec();
    let stream = driver.create_stream().unwrap();
    let (target, source) = (mapped.at(0).offset(Bytes(64)), mapped.at(0));
    let arguments = [KernelArgument::Address(target), KernelArgument::Address(source)];
    // A struct of one pointer is passed as a pointer is.
    let pieces = [source.0];
    let further = [KernelArgument::Address(target.offset(Bytes(4))), KernelArgument::Struct(&pieces)];
    // SAFETY: the arguments are the kernel's, everything outlives the synchronize.
    unsafe {
        let kernel = driver.find_kernel(module, c"copy_one").unwrap();
        let copy = HostToDevice { target: source, source: host.start, size: Bytes(4) };
        driver.copy_to_device(&[copy], stream).unwrap();
        driver.launch(kernel, LaunchGrid::linear(1, 1), &arguments, stream).unwrap();
        driver.launch(kernel, LaunchGrid::linear(1, 1), &further, stream).unwrap();
        driver.copy_to_host(host.start.wrapping_add(8), target, Bytes(8), stream).unwrap();
        driver.synchronize_stream(stream).unwrap();
        let nothing = driver.launch(kernel, LaunchGrid::linear(0, 1), &arguments, stream).unwrap_err();
        assert!(matches!(nothing, DriverError::InvalidArgument { .. }), "{nothing}");
        let unknown = driver.find_kernel(module, c"copy_two").unwrap_err();
        assert!(unknown.to_string().contains("copy_two"), "{unknown}");
        driver.unload_module(module).unwrap();
        driver.destroy_stream(stream).unwrap();
    }
    assert_eq!(host.bytes_mut()[8..16], words.repeat(2));
}

fn runs_none(driver: &dyn Driver, refusal: &DriverError) {
    let is_said = |error: &DriverError| assert!(matches!(error, DriverError::NoKernels { .. }), "{error}");
    is_said(refusal);
    // SAFETY: a device without kernels looks at no handle.
    unsafe {
        is_said(&driver.find_kernel(ModuleHandle(1), c"copy_one").unwrap_err());
        let launched = driver.launch(KernelHandle(1), LaunchGrid::linear(1, 1), &[], StreamHandle::DEFAULT);
        is_said(&launched.unwrap_err());
        is_said(&driver.unload_module(ModuleHandle(1)).unwrap_err());
    }
}

fn what_is_no_module_for_this_device_is_refused(driver: &dyn Driver) {
    if driver.device_info().kind == DeviceKind::Host {
        return;
    }
    let newer = c".version 99.0\n.target sm_75\n.address_size 64\n";
    for image in [c"this is no module", newer] {
        // SAFETY: terminated text, which the driver is asked to refuse.
        match unsafe { driver.load_module(image) } {
            Err(DriverError::ModuleRefused { code, log, .. }) => assert!(code > 0 && !log.is_empty()),
            other => panic!("{other:?}"),
        }
    }
}
