//! What CUDA there is on this machine, asked without touching any device: for reports and for choosing a device.

use std::ffi::{c_char, c_int, c_uint};
use std::fmt;

use cudarc::driver::sys::CUdevice_attribute_enum as Attribute;

use super::api::{Api, NO_DEVICE};
use crate::error::{DriverError, Result};
use crate::types::{Bytes, DeviceOrdinal};

/// The oldest driver that works: it numbers itself 12000 for 12.0.
pub(super) const OLDEST_DRIVER: u32 = 12_000;

/// Whether CUDA can be used, and if not, why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaProbe {
    /// The driver's version as it numbers itself (13000 is 13.0), as soon as there is a driver.
    pub driver_version: Option<u32>,
    /// The devices, by ordinal.
    pub devices: Vec<CudaDeviceProbe>,
    /// Why none of it can be used.
    pub refusal: Option<DriverError>,
}

/// One device of a [`CudaProbe`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaDeviceProbe {
    /// Which one.
    pub ordinal: DeviceOrdinal,
    /// Its name.
    pub name: String,
    /// All of its memory.
    pub total_memory: Bytes,
    /// Whether host memory can be registered read-only.
    pub read_only_registration: bool,
    /// Why this device cannot be used.
    pub refusal: Option<DriverError>,
}

impl CudaProbe {
    /// Whether at least one device can be used.
    pub fn usable(&self) -> bool {
        self.refusal.is_none() && self.devices.iter().any(|device| device.refusal.is_none())
    }

    pub(super) fn of(api: Result<Api>) -> Self {
        let mut probe = Self { driver_version: None, devices: Vec::new(), refusal: None };
        probe.refusal = api.and_then(|api| probe.fill(&api)).err();
        probe
    }

    fn fill(&mut self, api: &Api) -> Result<()> {
        let version = driver_version(api)?;
        self.driver_version = Some(version);
        let count = start(api, version, 0)?;
        for ordinal in 0..count {
            self.devices.push(probe_device(api, device(api, ordinal, count)?)?);
        }
        Ok(())
    }
}

/// One line: the version and the devices, or the reason.
impl fmt::Display for CudaProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(version) = self.driver_version {
            write!(f, "CUDA driver {}.{}", version / 1000, version % 1000 / 10)?;
        }
        if let Some(refusal) = &self.refusal {
            let separator = if self.driver_version.is_some() { ": " } else { "" };
            return write!(f, "{separator}{refusal}");
        }
        for device in &self.devices {
            write!(f, "; device {}: {}, {}", device.ordinal.0, device.name, device.total_memory)?;
            if let Some(refusal) = &device.refusal {
                write!(f, " ({refusal})")?;
            }
        }
        Ok(())
    }
}

/// The driver's version; works before it is initialised.
pub(super) fn driver_version(api: &Api) -> Result<u32> {
    let mut version: c_int = 0;
    // SAFETY: the pointer is valid for the write.
    let code = unsafe { (api.driver_version)(&raw mut version) };
    api.check("cuDriverGetVersion", code, String::new)?;
    Ok(u32::try_from(version).unwrap_or_default())
}

/// Initialises the driver and counts its devices; `asked` is the device that the caller is after.
pub(super) fn start(api: &Api, version: u32, asked: u32) -> Result<u32> {
    if version < OLDEST_DRIVER {
        return Err(DriverError::DriverTooOld { found: version, needed: OLDEST_DRIVER });
    }
    // SAFETY: no precondition.
    let code = unsafe { (api.init)(0) };
    if code == NO_DEVICE {
        return Err(DriverError::NoSuchDevice { asked, count: 0 });
    }
    api.check("cuInit", code, String::new)?;
    let mut count: c_int = 0;
    // SAFETY: the pointer is valid for the write.
    let code = unsafe { (api.device_count)(&raw mut count) };
    api.check("cuDeviceGetCount", code, String::new)?;
    match u32::try_from(count) {
        Ok(count) if count > 0 => Ok(count),
        _ => Err(DriverError::NoSuchDevice { asked, count: 0 }),
    }
}

/// The driver's number of a device.
pub(super) fn device(api: &Api, ordinal: u32, count: u32) -> Result<c_int> {
    let missing = DriverError::NoSuchDevice { asked: ordinal, count };
    let Some(index) = c_int::try_from(ordinal).ok().filter(|_| ordinal < count) else { return Err(missing) };
    let mut device: c_int = 0;
    // SAFETY: the pointer is valid for the write.
    let code = unsafe { (api.device)(&raw mut device, index) };
    api.check("cuDeviceGet", code, || format!(": device {ordinal}"))?;
    Ok(device)
}

/// What a device is, and whether it can stream.
pub(super) fn probe_device(api: &Api, device: c_int) -> Result<CudaDeviceProbe> {
    let mut text: [c_char; 256] = [0; 256];
    // SAFETY: the buffer is as long as said, and the driver terminates what it writes.
    let code = unsafe { (api.device_name)(text.as_mut_ptr(), 256, device) };
    api.check("cuDeviceGetName", code, String::new)?;
    let bytes = text.iter().take_while(|byte| **byte != 0).map(|byte| byte.cast_unsigned());
    let name = String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned();
    let mut total = 0_usize;
    // SAFETY: the pointer is valid for the write.
    let code = unsafe { (api.device_memory)(&raw mut total, device) };
    api.check("cuDeviceTotalMem", code, String::new)?;
    let virtual_memory =
        attribute(api, device, Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED)?;
    let read_only = attribute(api, device, Attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED)?;
    let refusal = (!virtual_memory).then(|| DriverError::Unsupported {
        device: name.clone(),
        feature: "virtual memory management (cuMemMap)",
    });
    Ok(CudaDeviceProbe {
        ordinal: DeviceOrdinal(device.unsigned_abs()),
        name,
        total_memory: Bytes(total as u64),
        read_only_registration: read_only,
        refusal,
    })
}

fn attribute(api: &Api, device: c_int, which: Attribute) -> Result<bool> {
    let mut value: c_int = 0;
    // SAFETY: the pointer is valid for the write.
    let code = unsafe { (api.device_attribute)(&raw mut value, which as c_uint, device) };
    api.check("cuDeviceGetAttribute", code, || format!(": attribute {}", which as c_uint))?;
    Ok(value != 0)
}
