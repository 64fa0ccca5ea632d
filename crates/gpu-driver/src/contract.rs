//! The parts of the verbs' contracts that both drivers check before they act, in the same words.

use crate::error::{DriverError, Result};
use crate::types::{Bytes, DeviceAddress};

/// The error of a broken contract.
pub(crate) fn refuse<T>(call: &'static str, what: String) -> Result<T> {
    Err(DriverError::InvalidArgument { call, what })
}

/// Physical memory and addresses come in whole granules, at least one.
pub(crate) fn whole_granules(call: &'static str, size: Bytes, granularity: Bytes) -> Result<()> {
    if size == Bytes::ZERO || !size.0.is_multiple_of(granularity.0) {
        return refuse(call, format!("{size}; sizes are multiples of the granularity {granularity}"));
    }
    Ok(())
}

/// Mappings start at multiples of the granularity.
pub(crate) fn aligned_address(call: &'static str, address: DeviceAddress, granularity: Bytes) -> Result<()> {
    if !address.0.is_multiple_of(granularity.0) {
        return refuse(
            call,
            format!("{address:?}; addresses are multiples of the granularity {granularity}"),
        );
    }
    Ok(())
}

/// An alignment is a power of two, or zero for "any".
pub(crate) fn power_of_two(call: &'static str, alignment: Bytes) -> Result<()> {
    if alignment != Bytes::ZERO && !alignment.0.is_power_of_two() {
        return refuse(call, format!("alignment {alignment}; it must be a power of two"));
    }
    Ok(())
}
