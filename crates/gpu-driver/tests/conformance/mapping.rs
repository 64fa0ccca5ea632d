//! Addresses, pages and mappings: aliasing, remapping, release while mapped, and what is refused.

use gpu_driver::{Access, Bytes, Driver, DriverError};

use super::Check;
use super::rig::{HostBuffer, Mapped, download, upload};

pub(crate) const CHECKS: &[Check] = &[
    ("write_at_one_address_read_at_the_other", write_at_one_address_read_at_the_other),
    ("remap_shows_the_other_pages", remap_shows_the_other_pages),
    ("pages_live_until_the_last_mapping_is_gone", pages_live_until_the_last_mapping_is_gone),
    ("access_can_be_taken_and_given_back", access_can_be_taken_and_given_back),
    ("reservations_are_aligned", reservations_are_aligned),
    ("odd_sizes_are_refused", odd_sizes_are_refused),
    ("more_than_the_device_has_is_out_of_memory", more_than_the_device_has_is_out_of_memory),
];

fn write_at_one_address_read_at_the_other(driver: &dyn Driver) {
    let mapped = Mapped::new(driver, 2, 3);
    let source = HostBuffer::pattern(mapped.size.as_usize(), 1);
    upload(driver, mapped.at(1), &source);
    for copy in 0..3 {
        assert_eq!(download(driver, mapped.at(copy), mapped.size), source.bytes(), "mapping {copy}");
    }
}

fn remap_shows_the_other_pages(driver: &dyn Driver) {
    let granule = driver.device_info().granularity;
    let range = driver.reserve_address(Bytes(granule.0 * 2), Bytes::ZERO).unwrap();
    let second = range.offset(granule);
    let handles = [driver.create_pages(granule).unwrap(), driver.create_pages(granule).unwrap()];
    let contents = [HostBuffer::pattern(granule.as_usize(), 2), HostBuffer::pattern(granule.as_usize(), 3)];
    // SAFETY: whole handles inside the reservation, unmapped before they are mapped again, all work waited for.
    unsafe {
        for (address, handle, content) in
            [(range, handles[0], &contents[0]), (second, handles[1], &contents[1])]
        {
            driver.map_pages(address, granule, handle).unwrap();
            driver.set_access(address, granule, Access::ReadWrite).unwrap();
            upload(driver, address, content);
        }
        // Both in one call, then mapped the other way round.
        driver.unmap_pages(range, Bytes(granule.0 * 2)).unwrap();
        driver.map_pages(range, granule, handles[1]).unwrap();
        driver.map_pages(second, granule, handles[0]).unwrap();
        driver.set_access(range, Bytes(granule.0 * 2), Access::ReadWrite).unwrap();
        assert_eq!(download(driver, range, granule), contents[1].bytes());
        assert_eq!(download(driver, second, granule), contents[0].bytes());
        driver.unmap_pages(range, granule).unwrap();
        driver.unmap_pages(second, granule).unwrap();
        driver.release_pages(handles[0]).unwrap();
        driver.release_pages(handles[1]).unwrap();
        driver.free_address(range, Bytes(granule.0 * 2)).unwrap();
    }
}

fn pages_live_until_the_last_mapping_is_gone(driver: &dyn Driver) {
    let granule = driver.device_info().granularity;
    let both = Bytes(granule.0 * 2);
    let range = driver.reserve_address(both, Bytes::ZERO).unwrap();
    let pages = driver.create_pages(granule).unwrap();
    let content = HostBuffer::pattern(granule.as_usize(), 4);
    // SAFETY: as in the check above.
    unsafe {
        driver.map_pages(range, granule, pages).unwrap();
        driver.map_pages(range.offset(granule), granule, pages).unwrap();
        driver.set_access(range, both, Access::ReadWrite).unwrap();
        driver.release_pages(pages).unwrap();
        upload(driver, range, &content);
        driver.unmap_pages(range, granule).unwrap();
        assert_eq!(download(driver, range.offset(granule), granule), content.bytes());
        driver.unmap_pages(range.offset(granule), granule).unwrap();
        driver.free_address(range, both).unwrap();
    }
}

fn access_can_be_taken_and_given_back(driver: &dyn Driver) {
    let mapped = Mapped::new(driver, 1, 2);
    let content = HostBuffer::pattern(mapped.size.as_usize(), 5);
    upload(driver, mapped.at(0), &content);
    // SAFETY: mapped throughout, all work waited for.
    unsafe { driver.set_access(mapped.at(0), mapped.size, Access::None) }.unwrap();
    assert_eq!(download(driver, mapped.at(1), mapped.size), content.bytes());
    // SAFETY: mapped throughout.
    unsafe { driver.set_access(mapped.at(0), mapped.size, Access::ReadWrite) }.unwrap();
    assert_eq!(download(driver, mapped.at(0), mapped.size), content.bytes());
}

fn reservations_are_aligned(driver: &dyn Driver) {
    let granule = driver.device_info().granularity;
    for alignment in [Bytes::ZERO, granule, Bytes::mib(32)] {
        let size = Bytes(granule.0 * 3);
        let address = driver.reserve_address(size, alignment).unwrap();
        assert_eq!(address.0 % alignment.max(granule).0, 0, "alignment {alignment}");
        // SAFETY: nothing was mapped in it.
        unsafe { driver.free_address(address, size) }.unwrap();
    }
}

fn odd_sizes_are_refused(driver: &dyn Driver) {
    let granule = driver.device_info().granularity;
    for size in [Bytes::ZERO, Bytes(1), granule + Bytes(4096)] {
        assert!(driver.create_pages(size).is_err(), "pages of {size}");
        assert!(driver.reserve_address(size, Bytes::ZERO).is_err(), "addresses of {size}");
    }
}

fn more_than_the_device_has_is_out_of_memory(driver: &dyn Driver) {
    let granule = driver.device_info().granularity;
    let total = driver.memory_info().unwrap().total;
    let asked = (total + granule).checked_round_up(granule).unwrap();
    match driver.create_pages(asked) {
        Err(DriverError::OutOfMemory { asked: said, free, total: all }) => {
            assert_eq!(said, asked);
            assert!(free <= all);
        }
        other => panic!("{other:?}"),
    }
}
