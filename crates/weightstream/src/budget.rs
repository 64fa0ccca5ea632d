//! How much device memory a model's weights may take, as people write it.
//!
//! A budget is a number of bytes ("67108864", "512MiB", "2.2GB"), a share of the device ("30%"), or left open.
//! Turning one into bytes needs only the device's sizes, so everything here is pure.

use std::fmt;
use std::str::FromStr;

use gpu_driver::{Bytes, MemoryInfo};

use crate::error::{Error, Result};

/// The share of the free device memory an open budget takes; the rest is left to activations.
const OPEN_SHARE: f64 = 0.6;

/// The device memory a model's weights may take: base, buffers, resident parts, ring and rounding included.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Budget {
    /// Exactly this many bytes.
    Bytes(Bytes),
    /// This share of all the device's memory, above 0 and at most 1.
    DeviceShare(f64),
    /// 60 % of what is free on the device when the model is planned.
    Open,
    /// Whatever the model takes: everything is resident and nothing streams.
    Unlimited,
}

impl Budget {
    /// The budget in bytes on a device with `memory`; `None` means without limit.
    ///
    /// # Errors
    /// [`Error::Budget`] for nothing at all, a share that is not above 0 and at most 1, or more than the device
    /// has.
    pub fn resolve(self, memory: MemoryInfo) -> Result<Option<Bytes>> {
        let bytes = match self {
            Self::Unlimited => return Ok(None),
            Self::Open => share_of(memory.free, OPEN_SHARE),
            Self::DeviceShare(share) if share > 0.0 && share <= 1.0 => share_of(memory.total, share),
            Self::DeviceShare(share) => {
                return Err(Error::Budget {
                    given: format!("{}%", share * 100.0),
                    reason: "a share of the device must be above 0% and at most 100%".into(),
                });
            }
            Self::Bytes(bytes) => bytes,
        };
        if bytes == Bytes::ZERO {
            return Err(Error::Budget {
                given: self.to_string(),
                reason: "it must be more than nothing".into(),
            });
        }
        if bytes > memory.total {
            return Err(Error::Budget {
                given: self.to_string(),
                reason: format!("the device has only {}", memory.total),
            });
        }
        Ok(Some(bytes))
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => write!(f, "{bytes}"),
            Self::DeviceShare(share) => write!(f, "{}%", share * 100.0),
            Self::Open => f.write_str("open"),
            Self::Unlimited => f.write_str("unlimited"),
        }
    }
}

/// Reads `"67108864"`, `"512MiB"`, `"1.5 GiB"`, `"2.2GB"` (powers of ten without the `i`) or `"30%"`.
impl FromStr for Budget {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let refuse = |reason: &str| Error::Budget { given: format!("{text:?}"), reason: reason.into() };
        let trimmed = text.trim();
        let split = trimmed
            .find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '-' || c == '+' || c == '_'))
            .unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let number: f64 = number
            .replace('_', "")
            .parse()
            .map_err(|_| refuse("write bytes (\"67108864\"), \"512MiB\", \"2.2GB\" or \"30%\""))?;
        let unit = unit.trim().to_ascii_lowercase();
        // The unit is judged before the number: of "0x10" it is the text, not the value, that is wrong.
        let scale = match unit.as_str() {
            "" | "b" | "bytes" | "%" => 1.0,
            "kib" => 1024.0,
            "mib" => 1024.0 * 1024.0,
            "gib" => 1024.0 * 1024.0 * 1024.0,
            "tib" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
            "kb" => 1e3,
            "mb" => 1e6,
            "gb" => 1e9,
            "tb" => 1e12,
            _ => {
                return Err(refuse(
                    "write bytes (\"67108864\"), \"512MiB\", \"2.2GB\" or \"30%\"; known units are KiB, MiB, GiB, TiB, kB, \
                     MB, GB, TB and %",
                ));
            }
        };
        if number.is_nan() || number <= 0.0 {
            return Err(refuse("it must be more than nothing"));
        }
        if unit == "%" {
            if number > 100.0 {
                return Err(refuse("a share of the device is at most 100%"));
            }
            return Ok(Self::DeviceShare(number / 100.0));
        }
        let bytes = number * scale;
        if bytes < 1.0 || bytes >= 2f64.powi(63) {
            return Err(refuse("it must be at least one byte and less than 2^63"));
        }
        Ok(Self::Bytes(whole(bytes)))
    }
}

/// `share` of `memory`.
fn share_of(memory: Bytes, share: f64) -> Bytes {
    whole(memory.0 as f64 * share)
}

/// Whole bytes of a number that is known not to be negative.
#[expect(clippy::cast_sign_loss, reason = "sizes and the shares of them that are allowed are above zero")]
fn whole(bytes: f64) -> Bytes {
    Bytes(bytes as u64)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]
    use super::*;

    const DEVICE: MemoryInfo = MemoryInfo { free: Bytes(1000), total: Bytes(2000) };

    fn bytes(text: &str) -> u64 {
        match text.parse().unwrap() {
            Budget::Bytes(bytes) => bytes.0,
            other => panic!("{text} was read as {other:?}"),
        }
    }

    #[test]
    fn sizes_are_read_with_binary_and_decimal_units() {
        assert_eq!(bytes("67108864"), 67_108_864);
        assert_eq!(bytes("512MiB"), 512 << 20);
        assert_eq!(bytes(" 1.5 GiB "), 3 << 29);
        assert_eq!(bytes("2.2GB"), 2_200_000_000);
        assert_eq!(bytes("1_000"), 1000);
    }

    #[test]
    fn shares_resolve_against_the_whole_device() {
        let budget: Budget = "30%".parse().unwrap();
        assert_eq!(budget.resolve(DEVICE).unwrap(), Some(Bytes(600)));
        assert_eq!(Budget::Open.resolve(DEVICE).unwrap(), Some(Bytes(600)));
        assert_eq!(Budget::Unlimited.resolve(DEVICE).unwrap(), None);
    }

    #[test]
    fn what_cannot_be_a_budget_is_refused_with_the_reason() {
        for text in
            ["", "abc", "-1", "0", "0%", "101%", "5 parsec", "nan", "1e3", "--5", "0.2", "99999999999TB"]
        {
            let error = text.parse::<Budget>().unwrap_err().to_string();
            assert!(error.contains("budget"), "{text:?}: {error}");
        }
        let error = "0x10".parse::<Budget>().unwrap_err().to_string();
        assert!(error.contains("write bytes") && error.contains("0x10"), "{error}");
        assert!(Budget::Bytes(Bytes(0)).resolve(DEVICE).is_err());
        assert!(Budget::Bytes(Bytes(2001)).resolve(DEVICE).is_err());
        assert!(Budget::DeviceShare(1.5).resolve(DEVICE).is_err());
        assert!(Budget::DeviceShare(f64::NAN).resolve(DEVICE).is_err());
    }
}
