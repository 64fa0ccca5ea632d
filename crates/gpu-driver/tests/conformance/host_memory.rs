//! Registration of host memory: what is refused, and that it can be done again.

use gpu_driver::{Bytes, Driver, DriverError, Registration, StreamHandle};

use super::Check;
use super::rig::{HostBuffer, Mapped};

pub(crate) const CHECKS: &[Check] = &[
    ("registering_twice_is_refused", registering_twice_is_refused),
    ("registering_again_after_unregistering", registering_again_after_unregistering),
    ("unregistering_what_is_not_registered_is_refused", unregistering_what_is_not_registered_is_refused),
    ("neighbours_can_be_registered_apart", neighbours_can_be_registered_apart),
    ("a_source_registered_in_part_is_refused", a_source_registered_in_part_is_refused),
];

fn registering_twice_is_refused(driver: &dyn Driver) {
    let buffer = HostBuffer::new(16 * HostBuffer::PAGE);
    let inner = buffer.start.wrapping_add(4 * HostBuffer::PAGE);
    // SAFETY: whole pages that outlive the registration; no copy uses them.
    unsafe {
        driver.register_host(buffer.start, buffer.size(), Registration::ReadWrite).unwrap();
        for (start, pages) in [(buffer.start, 16), (inner, 2)] {
            let size = Bytes((pages * HostBuffer::PAGE) as u64);
            match driver.register_host(start, size, Registration::ReadWrite) {
                Err(DriverError::Call { code, name, .. }) => {
                    assert_eq!(code, 712);
                    assert_eq!(name, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED");
                }
                other => panic!("{other:?}"),
            }
        }
        driver.unregister_host(buffer.start).unwrap();
    }
}

fn registering_again_after_unregistering(driver: &dyn Driver) {
    let buffer = HostBuffer::new(64 * HostBuffer::PAGE);
    for _ in 0..3 {
        // SAFETY: as above.
        unsafe {
            driver.register_host(buffer.start, buffer.size(), Registration::ReadWrite).unwrap();
            driver.unregister_host(buffer.start).unwrap();
        }
    }
}

fn unregistering_what_is_not_registered_is_refused(driver: &dyn Driver) {
    let buffer = HostBuffer::new(HostBuffer::PAGE);
    // SAFETY: the driver is asked to refuse; nothing is registered here.
    unsafe {
        assert!(driver.unregister_host(buffer.start).is_err());
        driver.register_host(buffer.start, buffer.size(), Registration::ReadWrite).unwrap();
        driver.unregister_host(buffer.start).unwrap();
        assert!(driver.unregister_host(buffer.start).is_err());
    }
}

fn neighbours_can_be_registered_apart(driver: &dyn Driver) {
    let buffer = HostBuffer::new(8 * HostBuffer::PAGE);
    let half = Bytes(buffer.size().0 / 2);
    let second = buffer.start.wrapping_add(half.as_usize());
    // SAFETY: as above.
    unsafe {
        driver.register_host(buffer.start, half, Registration::ReadWrite).unwrap();
        driver.register_host(second, half, Registration::ReadWrite).unwrap();
        driver.unregister_host(buffer.start).unwrap();
        driver.unregister_host(second).unwrap();
    }
}

fn a_source_registered_in_part_is_refused(driver: &dyn Driver) {
    let mapped = Mapped::new(driver, 1, 1);
    let buffer = HostBuffer::pattern(8 * HostBuffer::PAGE, 31);
    let half = Bytes(buffer.size().0 / 2);
    // SAFETY: as above; the refused copy never runs.
    unsafe {
        driver.register_host(buffer.start, half, Registration::ReadWrite).unwrap();
        let copy = buffer.copy_to(0, buffer.size().0, mapped.at(0));
        assert!(driver.copy_to_device(&[copy], StreamHandle::DEFAULT).is_err());
        driver.synchronize_stream(StreamHandle::DEFAULT).unwrap();
        driver.unregister_host(buffer.start).unwrap();
    }
}
