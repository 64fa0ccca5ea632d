//! What the checks stand on: mapped device memory and page-aligned host memory that give themselves back.

use std::alloc::{Layout, alloc_zeroed, dealloc};

use gpu_driver::{Access, Bytes, DeviceAddress, Driver, HostToDevice, PageHandle, StreamHandle};

/// One handle mapped at one or more addresses.
pub(crate) struct Mapped<'a> {
    driver: &'a dyn Driver,
    pub(crate) size: Bytes,
    pub(crate) reserved: DeviceAddress,
    pub(crate) copies: u64,
    pub(crate) pages: PageHandle,
}

impl<'a> Mapped<'a> {
    /// `granules` of memory mapped `copies` times, one after another.
    pub(crate) fn new(driver: &'a dyn Driver, granules: u64, copies: u64) -> Self {
        let size = Bytes(driver.device_info().granularity.0 * granules);
        let reserved = driver.reserve_address(Bytes(size.0 * copies), Bytes::ZERO).unwrap();
        let pages = driver.create_pages(size).unwrap();
        for copy in 0..copies {
            // SAFETY: the part of the fresh reservation is empty, the pages are alive.
            unsafe { driver.map_pages(reserved.offset(Bytes(size.0 * copy)), size, pages) }.unwrap();
        }
        // SAFETY: all of it was mapped just above.
        unsafe { driver.set_access(reserved, Bytes(size.0 * copies), Access::ReadWrite) }.unwrap();
        Self { driver, size, reserved, copies, pages }
    }

    /// The address of the n-th mapping.
    pub(crate) fn at(&self, copy: u64) -> DeviceAddress {
        self.reserved.offset(Bytes(self.size.0 * copy))
    }
}

impl Drop for Mapped<'_> {
    fn drop(&mut self) {
        let all = Bytes(self.size.0 * self.copies);
        // SAFETY: the checks have waited for all their work.
        unsafe {
            self.driver.unmap_pages(self.reserved, all).unwrap();
            self.driver.release_pages(self.pages).unwrap();
            self.driver.free_address(self.reserved, all).unwrap();
        }
    }
}

/// Page-aligned host memory.
pub(crate) struct HostBuffer {
    pub(crate) start: *mut u8,
    layout: Layout,
}

impl HostBuffer {
    pub(crate) const PAGE: usize = 4096;

    pub(crate) fn new(size: usize) -> Self {
        let layout = Layout::from_size_align(size.next_multiple_of(Self::PAGE), Self::PAGE).unwrap();
        // SAFETY: the layout is not empty in any check.
        let start = unsafe { alloc_zeroed(layout) };
        assert!(!start.is_null());
        Self { start, layout }
    }

    /// Bytes that no shift of themselves equals.
    pub(crate) fn pattern(size: usize, seed: u64) -> Self {
        let mut buffer = Self::new(size);
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        for byte in buffer.bytes_mut() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *byte = (state >> 56) as u8;
        }
        buffer
    }

    pub(crate) fn size(&self) -> Bytes {
        Bytes(self.layout.size() as u64)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is ours and initialised; no check reads while a copy writes.
        unsafe { std::slice::from_raw_parts(self.start, self.layout.size()) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`, exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.layout.size()) }
    }

    /// A copy of `size` of its bytes from `offset`.
    pub(crate) fn copy_to(&self, offset: u64, size: u64, target: DeviceAddress) -> HostToDevice {
        assert!(offset + size <= self.size().0);
        HostToDevice { target, source: self.start.wrapping_add(offset as usize), size: Bytes(size) }
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; the checks have waited for all copies.
        unsafe { dealloc(self.start, self.layout) };
    }
}

/// Puts bytes on the device and waits.
pub(crate) fn upload(driver: &dyn Driver, target: DeviceAddress, source: &HostBuffer) {
    let copy = source.copy_to(0, source.size().0, target);
    // SAFETY: mapped target, live source, waited for.
    unsafe { driver.copy_to_device(&[copy], StreamHandle::DEFAULT) }.unwrap();
    driver.synchronize_stream(StreamHandle::DEFAULT).unwrap();
}

/// Reads bytes back and waits.
pub(crate) fn download(driver: &dyn Driver, source: DeviceAddress, size: Bytes) -> Vec<u8> {
    let target = HostBuffer::new(size.as_usize());
    // SAFETY: mapped source, live target, waited for.
    unsafe { driver.copy_to_host(target.start, source, size, StreamHandle::DEFAULT) }.unwrap();
    driver.synchronize_stream(StreamHandle::DEFAULT).unwrap();
    target.bytes()[..size.as_usize()].to_vec()
}
