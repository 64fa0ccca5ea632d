//! One layer, `y = max(0, W x)`, computed the same way three times: resident, on the emulator, and by a CUDA kernel.
//!
//! All three add the products of a row in the same order with fused multiply-adds, so that their outputs are the same
//! bits and not merely close.

use std::cell::RefCell;
use std::error::Error;
use std::ffi::CStr;
use std::sync::Arc;

use gpu_driver::{CudaDriver, HostDriver, HostOptions, Kernel, KernelArgument, LaunchGrid, Module};
use pinned_pool::{HostBytes, HostRun, TransferStream};
use vmm_alloc::{AddressSpace, PagePool};
use weightstream::{Bytes, DeviceAddress, DeviceOrdinal, Driver, StreamHandle};

use super::WIDTH;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// `layer(W, x, y, width)`: a thread a row. PTX 7.0, for every GPU since Turing.
const LAYER: &CStr = c".version 7.0
.target sm_75
.address_size 64
.visible .entry layer(.param .u64 w, .param .u64 x, .param .u64 y, .param .u32 width)
{
    .reg .pred %p;
    .reg .f32 %sum, %a, %b;
    .reg .u32 %row, %n, %i, %block, %size, %lane;
    .reg .u64 %w, %x, %y, %step;
    ld.param.u64 %w, [w];
    ld.param.u64 %x, [x];
    ld.param.u64 %y, [y];
    ld.param.u32 %n, [width];
    mov.u32 %block, %ctaid.x;
    mov.u32 %size, %ntid.x;
    mov.u32 %lane, %tid.x;
    mad.lo.u32 %row, %block, %size, %lane;
    setp.ge.u32 %p, %row, %n;
    @%p ret;
    cvta.to.global.u64 %w, %w;
    cvta.to.global.u64 %x, %x;
    cvta.to.global.u64 %y, %y;
    mul.wide.u32 %step, %row, %n;
    shl.b64 %step, %step, 2;
    add.u64 %w, %w, %step;
    mul.wide.u32 %step, %row, 4;
    add.u64 %y, %y, %step;
    mov.f32 %sum, 0f00000000;
    mov.u32 %i, 0;
LOOP:
    ld.global.f32 %a, [%w];
    ld.global.f32 %b, [%x];
    fma.rn.f32 %sum, %a, %b, %sum;
    add.u64 %w, %w, 4;
    add.u64 %x, %x, 4;
    add.u32 %i, %i, 1;
    setp.lt.u32 %p, %i, %n;
    @%p bra LOOP;
    max.f32 %sum, %sum, 0f00000000;
    st.global.f32 [%y], %sum;
    ret;
}
";

/// A layer from weights in RAM.
pub(crate) fn resident_layer(weights: &[u8], input: &[f32]) -> Vec<f32> {
    let number = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let row = |row: &[u8]| row.chunks(4).zip(input).fold(0.0_f32, |sum, (w, x)| number(w).mul_add(*x, sum));
    weights.chunks(WIDTH * 4).map(|weights| row(weights).max(0.0)).collect()
}

/// Where layers are computed.
pub(crate) enum Compute {
    /// By the calling thread, which is the emulator's compute stream.
    Host { driver: Arc<HostDriver>, activation: RefCell<Vec<f32>> },
    /// By a kernel, from and to two halves of one granule.
    Cuda {
        driver: Arc<CudaDriver>,
        kernel: Kernel,
        memory: Arc<AddressSpace>,
        stream: TransferStream,
        turn: RefCell<u64>,
    },
}

impl Compute {
    /// "host", "cuda", or the GPU if there is one.
    pub(crate) fn open(asked: Option<&str>) -> Result<Self> {
        match asked {
            Some("host") => Self::host(),
            Some("cuda") => Self::cuda(CudaDriver::open(DeviceOrdinal(0))?),
            None => CudaDriver::open(DeviceOrdinal(0)).map_or_else(|_| Self::host(), Self::cuda),
            Some(other) => Err(format!("unknown device {other:?}; write host or cuda").into()),
        }
    }

    fn host() -> Result<Self> {
        let driver = Arc::new(HostDriver::new(HostOptions::new(Bytes::mib(256)))?);
        Ok(Self::Host { driver, activation: RefCell::default() })
    }

    fn cuda(driver: CudaDriver) -> Result<Self> {
        let driver = Arc::new(driver);
        // SAFETY: the text is terminated PTX.
        let kernel = unsafe { Module::load(driver.clone(), LAYER) }?.kernel(c"layer")?;
        let granule = driver.device_info().granularity;
        let pool = PagePool::new(driver.clone(), granule, granule)?;
        let memory = AddressSpace::reserve(driver.clone(), granule, 1)?;
        memory.map(0, &pool.take(1)?)?;
        let stream = TransferStream::new(driver.clone())?;
        Ok(Self::Cuda { driver, kernel, memory, stream, turn: RefCell::new(0) })
    }

    pub(crate) fn driver(&self) -> Arc<dyn Driver> {
        match self {
            Self::Host { driver, .. } => driver.clone(),
            Self::Cuda { driver, .. } => driver.clone(),
        }
    }

    /// The stream that layers are submitted to.
    pub(crate) fn stream(&self) -> StreamHandle {
        match self {
            Self::Host { .. } => StreamHandle::DEFAULT,
            Self::Cuda { stream, .. } => stream.handle(),
        }
    }

    /// The input of the next layer.
    pub(crate) fn set_input(&self, input: &[f32]) -> Result<()> {
        match self {
            Self::Host { activation, .. } => *activation.borrow_mut() = input.to_vec(),
            Self::Cuda { memory, stream, turn, .. } => {
                *turn.borrow_mut() = 0;
                let bytes: Vec<u8> = input.iter().flat_map(|value| value.to_le_bytes()).collect();
                stream.copy(memory, &[HostRun::new(0, HostBytes::of(&Arc::new(bytes)))])?;
            }
        }
        Ok(())
    }

    /// Submits a layer with the weights at `weights`; its output is the next layer's input.
    ///
    /// # Safety
    /// The weights are present for work of [`stream`](Self::stream).
    pub(crate) unsafe fn layer(&self, weights: DeviceAddress) -> Result<()> {
        match self {
            Self::Host { activation, .. } => {
                // SAFETY: the caller vouches for the address, which on the emulator is this process's.
                let bytes = unsafe { std::slice::from_raw_parts(weights.0 as *const u8, WIDTH * WIDTH * 4) };
                let output = resident_layer(bytes, &activation.borrow());
                *activation.borrow_mut() = output;
            }
            Self::Cuda { kernel, memory, stream, turn, .. } => {
                let half = |turn: u64| memory.address().offset(Bytes(turn % 2 * (memory.granule().0 / 2)));
                let now = *turn.borrow();
                let arguments = [
                    KernelArgument::Address(weights),
                    KernelArgument::Address(half(now)),
                    KernelArgument::Address(half(now + 1)),
                    KernelArgument::U32(WIDTH as u32),
                ];
                // SAFETY: the arguments are the kernel's; the caller vouches for the weights, the halves are ours.
                unsafe { kernel.launch(LaunchGrid::linear(WIDTH as u32, 128), &arguments, stream.handle()) }?;
                *turn.borrow_mut() = now + 1;
            }
        }
        Ok(())
    }

    /// The output of the last layer, once it has run.
    pub(crate) fn output(&self) -> Result<Vec<f32>> {
        match self {
            Self::Host { activation, .. } => Ok(activation.borrow().clone()),
            Self::Cuda { memory, stream, turn, .. } => {
                let mut bytes = vec![0; WIDTH * 4];
                stream.read_back(memory, *turn.borrow() % 2 * (memory.granule().0 / 2), &mut bytes)?;
                stream.drain()?;
                Ok(bytes.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
            }
        }
    }
}
