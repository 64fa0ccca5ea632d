//! Where a weight's parts lie on the device, and how kernels are told about the numbers in them.

use gpu_driver::{Bytes, DeviceAddress};
use quant_router::formats::Number;
use quant_router::{Part, PartRole, QuantError, QuantWeight};

use crate::error::{KernelError, Result};
use crate::launch::DevicePart;

/// Device memory by tensor.
#[derive(Debug, Clone, Copy)]
pub(super) enum Source<'a> {
    /// What the caller gave.
    Given(&'a [DevicePart<'a>]),
    /// Nothing yet: a part of any size lies anywhere. For asking whether a weight could be planned for.
    Anywhere,
}

/// Numbers in device memory: their address, and how kernels name their type.
#[derive(Debug, Clone, Copy)]
pub(super) struct Numbers {
    pub(super) address: u64,
    pub(super) number: Number,
}

impl Numbers {
    /// The address that says there are none.
    pub(super) const NONE: Self = Self { address: 0, number: Number::F32 };

    /// How numbers.cuh names the type.
    pub(super) const fn kind(self) -> u32 {
        match self.number {
            Number::F16 => 1,
            Number::Bf16 => 2,
            Number::E4m3 => 3,
            Number::E5m2 => 4,
            Number::E8m0 => 5,
            Number::U8 => 6,
            Number::I8 => 7,
            // F32. A type that is added is refused by `numbers`, which knows these alone.
            _ => 0,
        }
    }
}

impl Source<'_> {
    /// The address of a part, which must have exactly so many bytes and lie at a multiple of so many.
    pub(super) fn bytes(self, weight: &QuantWeight, part: &Part, need: u64, multiple: u64) -> Result<u64> {
        let parts = match self {
            Self::Anywhere => return Ok(1 << 20),
            Self::Given(parts) => parts,
        };
        let (layer, role, tensor) = (weight.name.clone(), part.role, part.tensor.clone());
        let Some(given) = parts.iter().find(|given| given.tensor == part.tensor) else {
            return Err(QuantError::PartNotGiven { layer, role, tensor }.into());
        };
        let Bytes(have) = given.size;
        if have != need {
            return Err(QuantError::PartSize { layer, role, tensor, have, need }.into());
        }
        let DeviceAddress(address) = given.address;
        if address % multiple != 0 {
            let what = format!("{tensor:?}");
            return Err(KernelError::Misaligned { layer, what, address: given.address, need: multiple });
        }
        Ok(address)
    }

    /// A part that holds so many numbers.
    pub(super) fn numbers(self, weight: &QuantWeight, role: PartRole, count: u64) -> Result<Numbers> {
        self.numbers_as(weight, role, count, |number| number)
    }

    /// As `numbers`, where files leave the type open and the format knows it.
    pub(super) fn numbers_as(
        self,
        weight: &QuantWeight,
        role: PartRole,
        count: u64,
        meant: impl Fn(Number) -> Number,
    ) -> Result<Numbers> {
        let part = weight.needs(role)?;
        let known = |number: &Number| {
            use Number::{Bf16, E4m3, E5m2, E8m0, F16, F32, I8, U8};
            matches!(number, F32 | F16 | Bf16 | E4m3 | E5m2 | E8m0 | U8 | I8)
        };
        let number = Number::of(part.kind).filter(known).ok_or_else(|| QuantError::PartKind {
            layer: weight.name.clone(),
            tensor: part.tensor.clone(),
            have: format!("{} {:?}", part.kind, part.shape),
            need: "numbers".into(),
        })?;
        let number = meant(number);
        let size = number.bytes() as u64;
        let address = self.bytes(weight, part, count.saturating_mul(size), size)?;
        Ok(Numbers { address, number })
    }
}
