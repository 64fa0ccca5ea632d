//! Which mappings of files this process has, by address. Held weakly: a mapping lives as long as its users want it.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError, Weak};
use std::time::Duration;

use super::{FileMap, FileSpan};

/// By first address; the ranges are disjoint, as addresses of live mappings are.
static MAPS: RwLock<BTreeMap<usize, Entry>> = RwLock::new(BTreeMap::new());
/// How often a lock is tried, and how long between. A process forked while another thread held the lock has it held for
/// ever: then the registry is taken to be empty, which is always correct, as the bytes are in memory too.
const TRIES: u32 = 200;
const BETWEEN: Duration = Duration::from_micros(500);

#[derive(Debug)]
struct Entry {
    end: usize,
    map: Weak<FileMap>,
}

/// The bytes of a file that lie at these addresses, if all of them lie in one live [`FileMap`].
///
/// Whether they still are the file's is another question: [`FileSpan::modified`].
pub fn file_span(address: *const u8, size: u64) -> Option<FileSpan> {
    let start = address.addr();
    let end = start.checked_add(usize::try_from(size).ok()?)?;
    let map = {
        let maps = read()?;
        let (_, entry) = maps.range(..=start).next_back()?;
        (end <= entry.end).then(|| entry.map.upgrade())??
    };
    // Dropped after the lock: the last user may have let go meanwhile, and dropping takes the lock.
    let offset = (start - map.addresses().start) as u64;
    Some(FileSpan::new(map, offset..offset + size))
}

/// Notes a mapping. One of no bytes has no addresses to be found by.
pub(super) fn add(map: &Arc<FileMap>) {
    let addresses = map.addresses();
    if addresses.is_empty() {
        return;
    }
    if let Some(mut maps) = write() {
        maps.insert(addresses.start, Entry { end: addresses.end, map: Arc::downgrade(map) });
    }
}

/// Forgets the mapping that begins there. It is still mapped while this runs, so that nobody else can have the address.
pub(super) fn remove(base: usize) {
    if let Some(mut maps) = write() {
        maps.remove(&base);
    }
}

fn read() -> Option<RwLockReadGuard<'static, BTreeMap<usize, Entry>>> {
    patiently(|| MAPS.try_read())
}

fn write() -> Option<RwLockWriteGuard<'static, BTreeMap<usize, Entry>>> {
    patiently(|| MAPS.try_write())
}

/// A poisoned map is whole: no operation on it stops half way.
fn patiently<G>(lock: impl Fn() -> Result<G, TryLockError<G>>) -> Option<G> {
    for _ in 0..TRIES {
        match lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(PoisonError::into_inner(poisoned)),
            Err(TryLockError::WouldBlock) => std::thread::sleep(BETWEEN),
        }
    }
    tracing::warn!(
        "the registry of mapped files stays locked, as after a fork; mapped tensors count as plain memory"
    );
    None
}
