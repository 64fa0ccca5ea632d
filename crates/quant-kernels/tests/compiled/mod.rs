//! The kernels compiled as C++ and run by the processor, behind the same driver verbs: `Kernels` does not know the difference.
#![allow(unsafe_code, clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::ffi::{CStr, c_void};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use gpu_driver::{
    Access, Bytes, DeviceAddress, DeviceInfo, Driver, DriverError, EventHandle, HostDriver, HostOptions,
    HostToDevice, KernelArgument, KernelHandle, LaunchGrid, MemoryInfo, ModuleHandle, PageHandle,
    Registration, Result, StreamHandle,
};
use libloading::Library;
use quant_kernels::{Family, THREADS};

/// The emulator, with kernels.
#[derive(Debug)]
pub(crate) struct Compiled {
    memory: HostDriver,
    library: Library,
    /// The newest devices whose modules are taken, as PTX names them.
    newest: u32,
}

impl Compiled {
    /// Compiles the kernels, or says why not.
    pub(crate) fn new() -> Option<Arc<Self>> {
        static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
        let library = BUILT.get_or_init(build).as_ref()?;
        // SAFETY: the library is what was just compiled; it runs nothing when loaded.
        let library = unsafe { Library::new(library) }.unwrap();
        let memory = HostDriver::new(HostOptions::new(Bytes::mib(64))).unwrap();
        Some(Arc::new(Self { memory, library, newest: u32::MAX }))
    }

    /// As a device of Turing, which refuses what is made for newer ones.
    pub(crate) fn turing() -> Option<Arc<Self>> {
        let mut driver = Arc::into_inner(Self::new()?)?;
        driver.newest = 75;
        Some(Arc::new(driver))
    }
}

/// The C++ compiler: `$CXX`, or the machine's.
fn compiler() -> Option<PathBuf> {
    let named = std::env::var_os("CXX").map(PathBuf::from);
    let works =
        |path: &PathBuf| Command::new(path).arg("--version").output().is_ok_and(|out| out.status.success());
    named.into_iter().chain(["c++", "g++", "clang++"].map(PathBuf::from)).find(works)
}

/// One library of all families.
fn build() -> Option<PathBuf> {
    let Some(compiler) = compiler() else {
        // Not by `eprintln`, which test runners keep to themselves when a test passes.
        let said =
            b"left out: no C++ compiler was found ($CXX, c++, g++, clang++), so that no kernel was run\n";
        std::io::stderr().write_all(said).unwrap();
        return None;
    };
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("kernels-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    // Without fused multiplication, as on the device. Two at a time: test machines have few processors.
    let options =
        ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-c", "-x", "c++"];
    let object = |family: &Family| folder.join(family.name()).with_extension("o");
    for pair in Family::ALL.chunks(2) {
        let started: Vec<_> = pair
            .iter()
            .map(|family| {
                let source = sources.join(family.name()).with_extension("cu");
                Command::new(&compiler)
                    .args(options)
                    .arg(source)
                    .arg("-o")
                    .arg(object(family))
                    .spawn()
                    .unwrap()
            })
            .collect();
        for mut process in started {
            assert!(process.wait().unwrap().success());
        }
    }
    let library = folder.join("kernels.so");
    let objects = Family::ALL.iter().map(object);
    assert!(
        Command::new(&compiler)
            .arg("-shared")
            .args(objects)
            .arg("-o")
            .arg(&library)
            .status()
            .unwrap()
            .success()
    );
    Some(library)
}

/// A kernel as host.h makes it: blocks, and its struct.
type Entry = unsafe extern "C" fn(u32, *const c_void);

impl Driver for Compiled {
    unsafe fn load_module(&self, image: &CStr) -> Result<ModuleHandle> {
        let target = image.to_str().unwrap().lines().find_map(|line| line.strip_prefix(".target sm_"));
        if target.unwrap().parse::<u32>().unwrap() > self.newest {
            let (name, log) = ("CUDA_ERROR_INVALID_PTX".into(), "a newer device is asked for".into());
            return Err(DriverError::ModuleRefused { code: 218, name, log });
        }
        let family = Family::ALL.iter().position(|family| family.ptx().as_bytes() == image.to_bytes());
        Ok(ModuleHandle(family.unwrap() as u64))
    }
    unsafe fn unload_module(&self, _: ModuleHandle) -> Result<()> {
        Ok(())
    }
    unsafe fn find_kernel(&self, _: ModuleHandle, name: &CStr) -> Result<KernelHandle> {
        // SAFETY: all that the library has are kernels of this type.
        let entry = unsafe { self.library.get::<Entry>(name.to_bytes_with_nul()) }.unwrap();
        Ok(KernelHandle(*entry as usize as u64))
    }
    unsafe fn launch(
        &self,
        kernel: KernelHandle,
        grid: LaunchGrid,
        arguments: &[KernelArgument<'_>],
        _: StreamHandle,
    ) -> Result<()> {
        assert_eq!((grid.threads, grid.blocks[1], grid.blocks[2]), ([THREADS, 1, 1], 1, 1));
        let [KernelArgument::Struct(words)] = arguments else { panic!("{arguments:?}") };
        // SAFETY: the handle is an entry of the library, which lives as long as `self`.
        let entry = unsafe { std::mem::transmute::<usize, Entry>(kernel.0 as usize) };
        // SAFETY: the caller vouches for the memory; the words are the kernel's struct.
        unsafe { entry(grid.blocks[0], words.as_ptr().cast()) };
        Ok(())
    }
    fn device_info(&self) -> &DeviceInfo {
        self.memory.device_info()
    }
    fn memory_info(&self) -> Result<MemoryInfo> {
        self.memory.memory_info()
    }
    fn reserve_address(&self, size: Bytes, alignment: Bytes) -> Result<DeviceAddress> {
        self.memory.reserve_address(size, alignment)
    }
    unsafe fn free_address(&self, address: DeviceAddress, size: Bytes) -> Result<()> {
        // SAFETY: the caller keeps the contract; so for all below.
        unsafe { self.memory.free_address(address, size) }
    }
    fn create_pages(&self, size: Bytes) -> Result<PageHandle> {
        self.memory.create_pages(size)
    }
    unsafe fn release_pages(&self, pages: PageHandle) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.memory.release_pages(pages) }
    }
    unsafe fn map_pages(&self, address: DeviceAddress, size: Bytes, pages: PageHandle) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.memory.map_pages(address, size, pages) }
    }
    unsafe fn unmap_pages(&self, address: DeviceAddress, size: Bytes) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.memory.unmap_pages(address, size) }
    }
    unsafe fn set_access(&self, address: DeviceAddress, size: Bytes, access: Access) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.memory.set_access(address, size, access) }
    }
    fn create_stream(&self) -> Result<StreamHandle> {
        self.memory.create_stream()
    }
    unsafe fn destroy_stream(&self, stream: StreamHandle) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.memory.destroy_stream(stream) }
    }
    fn synchronize_stream(&self, stream: StreamHandle) -> Result<()> {
        self.memory.synchronize_stream(stream)
    }
    fn is_capturing(&self, stream: StreamHandle) -> Result<bool> {
        self.memory.is_capturing(stream)
    }
    fn create_event(&self) -> Result<EventHandle> {
        self.memory.create_event()
    }
    fn create_timer(&self) -> Result<EventHandle> {
        self.memory.create_timer()
    }
    fn elapsed(&self, start: EventHandle, end: EventHandle) -> Result<Option<f64>> {
        self.memory.elapsed(start, end)
    }
    unsafe fn destroy_event(&self, event: EventHandle) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.memory.destroy_event(event) }
    }
    fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        self.memory.record_event(event, stream)
    }
    fn wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        self.memory.wait_event(stream, event)
    }
    fn query_event(&self, event: EventHandle) -> Result<bool> {
        self.memory.query_event(event)
    }
    fn synchronize_event(&self, event: EventHandle) -> Result<()> {
        self.memory.synchronize_event(event)
    }
    unsafe fn register_host(&self, address: *mut u8, size: Bytes, registration: Registration) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.memory.register_host(address, size, registration) }
    }
    unsafe fn unregister_host(&self, address: *mut u8) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.memory.unregister_host(address) }
    }
    unsafe fn copy_to_device(&self, copies: &[HostToDevice], stream: StreamHandle) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.memory.copy_to_device(copies, stream) }
    }
    unsafe fn copy_to_host(
        &self,
        target: *mut u8,
        source: DeviceAddress,
        size: Bytes,
        stream: StreamHandle,
    ) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.memory.copy_to_host(target, source, size, stream) }
    }
    unsafe fn fill(
        &self,
        address: DeviceAddress,
        size: Bytes,
        value: u8,
        stream: StreamHandle,
    ) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.memory.fill(address, size, value, stream) }
    }
}
