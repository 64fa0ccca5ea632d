//! Copies and fills: there, back, in part, in batches, unaligned, registered or not.

use gpu_driver::{Bytes, Driver, Registration, StreamHandle};

use super::Check;
use super::rig::{HostBuffer, Mapped, download, upload};

pub(crate) const CHECKS: &[Check] = &[
    ("copy_there_and_back", copy_there_and_back),
    ("copy_of_odd_offset_and_length", copy_of_odd_offset_and_length),
    ("batch_of_copies", batch_of_copies),
    ("long_batch_of_small_copies", long_batch_of_small_copies),
    ("empty_copies_are_nothing", empty_copies_are_nothing),
    ("fill_sets_bytes", fill_sets_bytes),
    ("copy_spans_mappings", copy_spans_mappings),
    ("copy_from_registered_memory", copy_from_registered_memory),
];

fn copy_there_and_back(driver: &dyn Driver) {
    let mapped = Mapped::new(driver, 3, 1);
    let stream = driver.create_stream().unwrap();
    let source = HostBuffer::pattern(mapped.size.as_usize(), 11);
    let target = HostBuffer::new(mapped.size.as_usize());
    // SAFETY: mapped device memory, live host memory, waited for before anything is dropped.
    unsafe {
        driver.copy_to_device(&[source.copy_to(0, source.size().0, mapped.at(0))], stream).unwrap();
        driver.copy_to_host(target.start, mapped.at(0), mapped.size, stream).unwrap();
        driver.synchronize_stream(stream).unwrap();
        assert!(target.bytes() == source.bytes(), "the bytes came back changed");
        driver.destroy_stream(stream).unwrap();
    }
}

fn copy_of_odd_offset_and_length(driver: &dyn Driver) {
    let mapped = Mapped::new(driver, 1, 1);
    let source = HostBuffer::pattern(mapped.size.as_usize(), 12);
    upload(driver, mapped.at(0), &HostBuffer::new(mapped.size.as_usize()));
    // SAFETY: as above; 13 + 4099 bytes fit in any granule.
    unsafe {
        driver
            .copy_to_device(&[source.copy_to(7, 4099, mapped.at(0).offset(Bytes(13)))], StreamHandle::DEFAULT)
    }
    .unwrap();
    driver.synchronize_stream(StreamHandle::DEFAULT).unwrap();
    let back = download(driver, mapped.at(0), mapped.size);
    assert!(back[..13].iter().all(|byte| *byte == 0));
    assert_eq!(back[13..13 + 4099], source.bytes()[7..7 + 4099]);
    assert!(back[13 + 4099..].iter().all(|byte| *byte == 0));
}

fn batch_of_copies(driver: &dyn Driver) {
    let mapped = Mapped::new(driver, 1, 1);
    let stream = driver.create_stream().unwrap();
    let sources =
        [HostBuffer::pattern(8192, 13), HostBuffer::pattern(8192, 14), HostBuffer::pattern(8192, 15)];
    upload(driver, mapped.at(0), &HostBuffer::new(mapped.size.as_usize()));
    let copies = [
        sources[0].copy_to(0, 5000, mapped.at(0)),
        sources[1].copy_to(100, 6000, mapped.at(0).offset(Bytes(5000))),
        sources[2].copy_to(1, 512, mapped.at(0).offset(Bytes(20_480))),
    ];
    // SAFETY: as above.
    unsafe { driver.copy_to_device(&copies, stream) }.unwrap();
    driver.synchronize_stream(stream).unwrap();
    let back = download(driver, mapped.at(0), mapped.size);
    assert_eq!(back[..5000], sources[0].bytes()[..5000]);
    assert_eq!(back[5000..11_000], sources[1].bytes()[100..6100]);
    assert_eq!(back[20_480..20_992], sources[2].bytes()[1..513]);
    assert!(back[11_000..20_480].iter().all(|byte| *byte == 0));
    // SAFETY: idle.
    unsafe { driver.destroy_stream(stream) }.unwrap();
}

fn long_batch_of_small_copies(driver: &dyn Driver) {
    let mapped = Mapped::new(driver, 1, 1);
    let stream = driver.create_stream().unwrap();
    let source = HostBuffer::pattern(65_536, 16);
    // The halves of every 256 bytes swapped, as 512 copies of 128.
    let copies: Vec<_> = (0..512_u64)
        .map(|part| source.copy_to((part ^ 1) * 128, 128, mapped.at(0).offset(Bytes(part * 128))))
        .collect();
    // SAFETY: as above.
    unsafe { driver.copy_to_device(&copies, stream) }.unwrap();
    driver.synchronize_stream(stream).unwrap();
    let back = download(driver, mapped.at(0), Bytes(65_536));
    for (part, chunk) in back.chunks(128).enumerate() {
        let from = (part ^ 1) * 128;
        assert_eq!(chunk, &source.bytes()[from..from + 128], "copy {part}");
    }
    // SAFETY: idle.
    unsafe { driver.destroy_stream(stream) }.unwrap();
}

fn empty_copies_are_nothing(driver: &dyn Driver) {
    let mapped = Mapped::new(driver, 1, 1);
    let source = HostBuffer::pattern(4096, 17);
    upload(driver, mapped.at(0), &HostBuffer::new(mapped.size.as_usize()));
    let empty = source.copy_to(0, 0, mapped.at(0));
    let full = source.copy_to(0, 16, mapped.at(0));
    // SAFETY: as above.
    unsafe {
        driver.copy_to_device(&[], StreamHandle::DEFAULT).unwrap();
        driver.copy_to_device(&[empty], StreamHandle::DEFAULT).unwrap();
        driver.copy_to_device(&[empty, full, empty], StreamHandle::DEFAULT).unwrap();
        driver.fill(mapped.at(0), Bytes::ZERO, 1, StreamHandle::DEFAULT).unwrap();
        driver.copy_to_host(source.start, mapped.at(0), Bytes::ZERO, StreamHandle::DEFAULT).unwrap();
    }
    driver.synchronize_stream(StreamHandle::DEFAULT).unwrap();
    let back = download(driver, mapped.at(0), Bytes(32));
    assert_eq!(back[..16], source.bytes()[..16]);
    assert_eq!(back[16..], [0; 16]);
}

fn fill_sets_bytes(driver: &dyn Driver) {
    let mapped = Mapped::new(driver, 1, 2);
    let stream = driver.create_stream().unwrap();
    // SAFETY: as above.
    unsafe {
        driver.fill(mapped.at(0), mapped.size, 0xFF, stream).unwrap();
        driver.fill(mapped.at(1).offset(Bytes(3)), Bytes(5), 0x21, stream).unwrap();
    }
    driver.synchronize_stream(stream).unwrap();
    let back = download(driver, mapped.at(0), Bytes(10));
    assert_eq!(back, [0xFF, 0xFF, 0xFF, 0x21, 0x21, 0x21, 0x21, 0x21, 0xFF, 0xFF]);
    // SAFETY: idle.
    unsafe { driver.destroy_stream(stream) }.unwrap();
}

fn copy_spans_mappings(driver: &dyn Driver) {
    // One copy over two mappings of the same pages: the second half is what stays.
    let mapped = Mapped::new(driver, 1, 2);
    let source = HostBuffer::pattern(mapped.size.as_usize() * 2, 18);
    upload(driver, mapped.at(0), &source);
    let half = mapped.size.as_usize();
    let both = download(driver, mapped.at(0), Bytes(mapped.size.0 * 2));
    assert!(both[..half] == both[half..], "the two mappings differ");
}

fn copy_from_registered_memory(driver: &dyn Driver) {
    let mapped = Mapped::new(driver, 2, 1);
    let stream = driver.create_stream().unwrap();
    let source = HostBuffer::pattern(mapped.size.as_usize(), 19);
    // SAFETY: whole pages that outlive the registration; idle before it ends.
    unsafe {
        driver.register_host(source.start, source.size(), Registration::ReadWrite).unwrap();
        driver.copy_to_device(&[source.copy_to(0, mapped.size.0, mapped.at(0))], stream).unwrap();
        driver.synchronize_stream(stream).unwrap();
        driver.unregister_host(source.start).unwrap();
        driver.destroy_stream(stream).unwrap();
    }
    assert!(download(driver, mapped.at(0), mapped.size) == source.bytes());
}
