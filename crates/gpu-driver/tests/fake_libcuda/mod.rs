//! Builds the fake driver library with the compiler that built the tests, and talks to it.
//!
//! Each test loads a file of its own, so each has a state of its own.

use std::ffi::{CString, c_char};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use gpu_driver::{CudaDriver, CudaProbe, DeviceOrdinal, Result};
use libloading::Library;

static BUILDING: Mutex<()> = Mutex::new(());
static COPIES: AtomicU64 = AtomicU64::new(0);

/// One loaded fake.
pub(crate) struct Fake {
    pub(crate) path: PathBuf,
    library: Library,
}

impl Fake {
    pub(crate) fn new() -> Self {
        Self::without("")
    }

    /// A fake that lacks a function: "map", "batch", or "" for none.
    pub(crate) fn without(what: &str) -> Self {
        let built = build(what);
        let copy = COPIES.fetch_add(1, Ordering::Relaxed);
        let path = built.with_file_name(format!("libcuda-{}-{copy}.so.1", std::process::id()));
        std::fs::copy(built, &path).unwrap();
        // SAFETY: our own library, built just above; it runs nothing when loaded.
        let library = unsafe { Library::new(&path) }.unwrap();
        Self { path, library }
    }

    pub(crate) fn open(&self) -> Result<CudaDriver> {
        self.open_device(0)
    }

    pub(crate) fn open_device(&self, ordinal: u32) -> Result<CudaDriver> {
        // SAFETY: the fake keeps the driver's contracts.
        unsafe { CudaDriver::open_library(&self.path, DeviceOrdinal(ordinal)) }
    }

    pub(crate) fn probe(&self) -> CudaProbe {
        // SAFETY: the fake keeps the driver's contracts.
        unsafe { CudaDriver::probe_library(&self.path) }
    }

    /// Answers the `nth` call of a function from now on with a code.
    pub(crate) fn fail(&self, function: &str, nth: u64, code: u32) {
        let name = CString::new(function).unwrap();
        // SAFETY: the fake's own function of this type.
        let fail = unsafe { self.library.get::<unsafe extern "C" fn(*const c_char, u64, u32)>("fake_fail") };
        // SAFETY: a terminated text.
        unsafe { fail.unwrap()(name.as_ptr(), nth, code) };
    }

    pub(crate) fn set(&self, setting: &str, value: i64) {
        let name = CString::new(setting).unwrap();
        // SAFETY: the fake's own function of this type.
        let set = unsafe { self.library.get::<unsafe extern "C" fn(*const c_char, i64)>("fake_set") };
        // SAFETY: a terminated text.
        unsafe { set.unwrap()(name.as_ptr(), value) };
    }

    /// How often a function was called.
    pub(crate) fn count(&self, function: &str) -> u64 {
        let name = CString::new(function).unwrap();
        // SAFETY: the fake's own function of this type.
        let count = unsafe { self.library.get::<unsafe extern "C" fn(*const c_char) -> u64>("fake_count") };
        // SAFETY: a terminated text.
        unsafe { count.unwrap()(name.as_ptr()) }
    }

    /// Calls that needed a current context and had none.
    pub(crate) fn outside_context(&self) -> u64 {
        self.number("fake_outside_context")
    }

    /// Things made and not given back, retained contexts included.
    pub(crate) fn alive(&self) -> u64 {
        self.number("fake_alive")
    }

    fn number(&self, function: &str) -> u64 {
        // SAFETY: the fake's own function of this type.
        let read = unsafe { self.library.get::<extern "C" fn() -> u64>(function) };
        read.unwrap()()
    }

    /// The calling thread's current context, and a way to set one as another library would.
    pub(crate) fn current_context(&self) -> u64 {
        let mut current = 0;
        // SAFETY: the fake's function of this type.
        let get = unsafe { self.library.get::<unsafe extern "C" fn(*mut u64) -> u32>("cuCtxGetCurrent") };
        // SAFETY: the pointer is valid for the write.
        unsafe { get.unwrap()(&raw mut current) };
        current
    }

    pub(crate) fn push_context(&self, context: u64) {
        // SAFETY: the fake's function of this type.
        let push = unsafe { self.library.get::<unsafe extern "C" fn(u64) -> u32>("cuCtxPushCurrent_v2") };
        // SAFETY: the fake follows no context.
        unsafe { push.unwrap()(context) };
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The library of this source, built once and kept.
fn build(without: &str) -> PathBuf {
    let _building = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    let mut hasher = DefaultHasher::new();
    [include_str!("libcuda.rs"), include_str!("state.rs")].hash(&mut hasher);
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("fake-libcuda");
    let built = folder.join(format!("{:016x}{without}.so", hasher.finish()));
    if built.exists() {
        return built;
    }
    std::fs::create_dir_all(&folder).unwrap();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake_libcuda/libcuda.rs");
    let compiler = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let partial = folder.join(format!("building-{}{without}.so", std::process::id()));
    let mut command = Command::new(compiler);
    command.args(["--edition", "2024", "--crate-type", "cdylib", "--crate-name", "cuda", source, "-o"]);
    command.arg(&partial);
    if !without.is_empty() {
        command.args(["--cfg", &format!("without_{without}")]);
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // Another process may have built it meanwhile; whichever comes last is as good.
    std::fs::rename(&partial, &built).unwrap();
    built
}
