//! What the fake driver library holds: its settings, its faults, and what is alive, with the checks on them.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{LazyLock, Mutex, MutexGuard};

pub const GRANULARITY: usize = 2 << 20;
pub const TOTAL: usize = 64 << 20;
pub const CONTEXT: u64 = 0x00C0_FFEE;

#[repr(C)]
pub struct Location {
    pub kind: c_int,
    pub id: c_int,
}

#[repr(C)]
pub struct AllocationProp {
    pub kind: c_int,
    pub handle_types: c_int,
    pub location: Location,
    pub win32: *mut c_void,
    pub flags: [u8; 8],
}

#[repr(C)]
pub struct AccessDesc {
    pub location: Location,
    pub flags: c_int,
}

#[repr(C)]
pub struct CopyAttributes {
    pub source_order: c_int,
    pub source_hint: Location,
    pub target_hint: Location,
    pub flags: c_uint,
}

#[derive(Default)]
pub struct State {
    pub settings: BTreeMap<String, i64>,
    pub faults: Vec<(String, u64, u32)>,
    pub counts: BTreeMap<String, u64>,
    pub outside_context: u64,
    pub retained: i64,
    pub next: u64,
    pub pages: BTreeMap<u64, usize>,
    pub reserved: BTreeMap<u64, usize>,
    pub mapped: BTreeMap<u64, (usize, bool)>,
    pub streams: BTreeSet<u64>,
    pub events: BTreeSet<u64>,
    pub timers: BTreeMap<u64, Option<i32>>,
    pub clock: i32,
    pub modules: BTreeSet<u64>,
    pub registered: BTreeMap<u64, usize>,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(|| {
    let defaults = [("version", 12_080), ("devices", 1), ("vmm", 1), ("read_only", 1), ("capturing", 0)];
    let settings = defaults.map(|(key, value)| (key.to_owned(), value)).into();
    Mutex::new(State { settings, next: 0x1000, ..State::default() })
});

thread_local! {
    pub static CURRENT: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

pub fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap()
}

pub fn setting(key: &str) -> i64 {
    state().settings.get(key).copied().unwrap_or_default()
}

pub unsafe fn text(name: *const c_char) -> String {
    unsafe { CStr::from_ptr(name) }.to_str().unwrap().to_owned()
}

pub fn enter(name: &str, needs_context: bool) -> Result<(), u32> {
    let inside = CURRENT.with_borrow(|stack| stack.last() == Some(&CONTEXT));
    let mut state = state();
    let count = state.counts.entry(name.to_owned()).or_default();
    let index = *count;
    *count += 1;
    if needs_context && !inside {
        state.outside_context += 1;
        return Err(201);
    }
    match state.faults.iter().find(|(fault, nth, _)| fault == name && *nth == index) {
        Some((_, _, code)) => Err(*code),
        None => Ok(()),
    }
}

pub fn need(holds: bool) -> Result<(), u32> {
    if holds { Ok(()) } else { Err(1) }
}

pub fn granules(size: usize) -> Result<(), u32> {
    need(size != 0 && size % GRANULARITY == 0)
}

pub fn used(state: &State) -> usize {
    state.pages.values().sum()
}

/// Starts of whole mappings that fill the range.
pub fn whole(state: &State, address: u64, size: usize) -> Result<Vec<u64>, u32> {
    let (mut at, end) = (address, address + size as u64);
    let mut starts = Vec::new();
    while at < end {
        let (size, _) = state.mapped.get(&at).ok_or(1_u32)?;
        starts.push(at);
        at += *size as u64;
    }
    need(at == end && size > 0)?;
    Ok(starts)
}

pub fn usable(state: &State, address: u64, size: usize) -> Result<(), u32> {
    let end = address + size as u64;
    let mut at = address;
    while at < end {
        let (start, (size, access)) = state.mapped.range(..=at).next_back().ok_or(1_u32)?;
        need(*access && start + *size as u64 > at)?;
        at = start + *size as u64;
    }
    Ok(())
}

/// Host memory is registered in one piece or not at all.
pub fn host(state: &State, address: u64, size: usize) -> Result<(), u32> {
    let end = address + size as u64;
    let touches = |(start, size): (&u64, &usize)| *start < end && start + *size as u64 > address;
    let split = |(start, size): (&u64, &usize)| *start > address || start + (*size as u64) < end;
    need(!state.registered.iter().any(|range| touches(range) && split(range)))
}

pub fn stream(state: &State, stream: u64) -> Result<(), u32> {
    if stream <= 2 || state.streams.contains(&stream) { Ok(()) } else { Err(400) }
}

pub fn copy_in(state: &State, target: u64, source: u64, size: usize) -> Result<(), u32> {
    usable(state, target, size)?;
    host(state, source, size)?;
    unsafe { std::ptr::copy(source as *const u8, target as *mut u8, size) };
    Ok(())
}
