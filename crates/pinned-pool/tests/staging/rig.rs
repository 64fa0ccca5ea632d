//! A line of random bytes in memory, in a file and in page-locked memory, and a device that it is copied to.

use std::io::Write;
use std::ops::Range;
use std::sync::Arc;

use gpu_driver::{Bytes, CopyOrder, Driver, Faulty, HostDriver, HostOptions};
use pinned_pool::{
    Event, FileBytes, HostBytes, HostStore, LineRun, Result, SourceFile, SourceTensor, StagedCopy, StagedJob,
    StagedStep, StagingLine, StagingOptions, StoreOptions, TransferStream,
};
use vmm_alloc::{AddressSpace, PagePool};

pub(crate) const GRANULE: Bytes = Bytes::kib(64);

/// Numbers without a pattern.
#[derive(Debug, Clone)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    pub(crate) fn bytes(&mut self, count: u64) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..count.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).collect();
        bytes.truncate(count as usize);
        bytes
    }
}

pub(crate) type Device = Faulty<HostDriver>;

pub(crate) fn device(order: CopyOrder, seed: u64) -> (Arc<HostDriver>, Arc<Device>) {
    let options = HostOptions::new(Bytes::mib(64)).granularity(GRANULE).order(order).seed(seed);
    let host = Arc::new(HostDriver::new(options).unwrap());
    let device = Arc::new(Faulty::new(Arc::clone(&host)));
    (host, device)
}

/// Where a tensor's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Memory,
    File,
    Locked,
}

/// Tensors on a line, the bytes that must arrive, and what they are read from.
pub(crate) struct Model {
    pub(crate) image: Vec<u8>,
    pub(crate) tensors: Vec<Range<u64>>,
    pub(crate) runs: Vec<LineRun>,
    pub(crate) file: tempfile::NamedTempFile,
}

impl Model {
    /// Tensors of these sizes in these places. In the file they follow one another with a gap now and then.
    pub(crate) fn new(device: &Arc<Device>, rng: &mut Rng, sizes: &[(u64, Place)]) -> Self {
        let driver: Arc<dyn Driver> = Arc::<Device>::clone(device);
        let (mut tensors, mut offset) = (Vec::new(), 0_u64);
        for &(size, _) in sizes {
            tensors.push(offset..offset + size);
            offset = (offset + size + 512 * rng.below(3)).next_multiple_of(512);
        }
        let line = Bytes(offset.max(1).next_multiple_of(GRANULE.0));
        let options = StoreOptions { slab_only: true, threads: Some(1), ..StoreOptions::default() };
        let mut store = HostStore::builder(driver, line, options);
        let (mut image, mut content, mut runs) = (vec![0; line.as_usize()], rng.bytes(8), Vec::new());
        let mut in_file = Vec::new();
        for (id, (range, &(size, place))) in (0..).zip(tensors.iter().zip(sizes)) {
            let bytes = Arc::new(rng.bytes(size));
            image[range.start as usize..range.end as usize].copy_from_slice(&bytes);
            match place {
                Place::Memory => {
                    let bytes = HostBytes::of(&bytes).into();
                    runs.push(LineRun::Staged { offset: range.start, bytes });
                }
                Place::Locked => {
                    let bytes = HostBytes::of(&bytes);
                    store.place(&[SourceTensor::new(id, range.start, bytes)]).unwrap();
                }
                Place::File => {
                    in_file.push((range.start, content.len() as u64, size));
                    content.extend_from_slice(&bytes);
                    let gap = if rng.below(3) == 0 { 8 * rng.below(40) } else { 0 };
                    content.extend(rng.bytes(gap));
                }
            }
        }
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&content).unwrap();
        let source = SourceFile::open(file.path()).unwrap();
        for (offset, at, size) in in_file {
            let bytes = FileBytes::new(&source, at, Bytes(size)).unwrap().into();
            runs.push(LineRun::Staged { offset, bytes });
        }
        // The runs keep what they need of the store.
        runs.extend(store.finish().unwrap().runs(0..line.0).into_iter().map(LineRun::Locked));
        runs.sort_by_key(LineRun::offset);
        Self { image, tensors, runs, file }
    }

    pub(crate) fn granules(&self) -> u32 {
        (self.image.len() as u64 / GRANULE.0) as u32
    }
}

/// A model's addresses, its stream and its part of the ring.
pub(crate) struct Rig {
    pub(crate) model: Model,
    pub(crate) space: Arc<AddressSpace>,
    pub(crate) stream: Arc<TransferStream>,
    pub(crate) line: StagingLine,
    pub(crate) copy: Arc<StagedCopy>,
    pub(crate) copied: Arc<Event>,
}

pub(crate) fn small_ring() -> StagingOptions {
    StagingOptions {
        chunk: Some(Bytes::kib(64)),
        bytes: Some(Bytes::kib(256)),
        threads: Some(2),
        ..StagingOptions::default()
    }
}

impl Rig {
    pub(crate) fn new(
        device: &Arc<Device>,
        model: Model,
        options: &StagingOptions,
        uncached: bool,
    ) -> Result<Self> {
        let driver: Arc<dyn Driver> = Arc::<Device>::clone(device);
        let space = AddressSpace::reserve(Arc::clone(&driver), GRANULE, model.granules())?;
        let limit = Bytes(u64::from(model.granules()) * GRANULE.0);
        let pool = PagePool::new(Arc::clone(&driver), GRANULE, limit)?;
        space.map(0, &pool.take(model.granules() as usize)?)?;
        let stream = Arc::new(TransferStream::new(Arc::clone(&driver))?);
        let copied = Arc::new(Event::new(driver)?);
        // So many bytes fit in no page cache: files are read around it.
        let line = StagingLine::new(&stream, options, if uncached { Bytes(1 << 50) } else { Bytes(1) })?;
        let copy = line.prepare(&space, &model.runs)?;
        Ok(Self { model, space, stream, line, copy, copied })
    }

    pub(crate) fn job(&self) -> StagedJob {
        let bytes = Bytes(self.model.image.len() as u64);
        let wipe = StagedStep::Fill { space: Arc::clone(&self.space), offset: 0, bytes, value: 0xFF };
        StagedJob {
            before: vec![StagedStep::Wait(Arc::clone(&self.copied)), wipe],
            copy: Some(Arc::clone(&self.copy)),
            copied: Some(Arc::clone(&self.copied)),
        }
    }

    /// Copies everything; whether each tensor has arrived.
    pub(crate) fn run(&self) -> Result<bool> {
        let ticket = self.line.submit(self.job())?;
        self.line.wait_submitted(ticket)?;
        self.arrived()
    }

    /// Whether each tensor is on the device.
    pub(crate) fn arrived(&self) -> Result<bool> {
        self.copied.synchronize()?;
        let mut read = vec![0; self.model.image.len()];
        self.stream.read_back(&self.space, 0, &mut read)?;
        let same = |range: &Range<u64>| {
            let range = range.start as usize..range.end as usize;
            read[range.clone()] == self.model.image[range]
        };
        Ok(self.model.tensors.iter().all(same))
    }

    pub(crate) fn close(mut self) -> Result<()> {
        self.line.close()?;
        self.stream.drain()
    }
}
