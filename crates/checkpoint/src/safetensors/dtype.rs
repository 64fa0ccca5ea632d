//! The names of element types, as headers spell them.

use ::safetensors::Dtype;

/// The element type that a header calls so; names are exact.
pub fn dtype_from_name(name: &str) -> Option<Dtype> {
    Some(match name {
        "BOOL" => Dtype::BOOL,
        "F4" => Dtype::F4,
        "F6_E2M3" => Dtype::F6_E2M3,
        "F6_E3M2" => Dtype::F6_E3M2,
        "U8" => Dtype::U8,
        "I8" => Dtype::I8,
        "F8_E5M2" => Dtype::F8_E5M2,
        "F8_E4M3" => Dtype::F8_E4M3,
        "F8_E8M0" => Dtype::F8_E8M0,
        "F8_E4M3FNUZ" => Dtype::F8_E4M3FNUZ,
        "F8_E5M2FNUZ" => Dtype::F8_E5M2FNUZ,
        "I16" => Dtype::I16,
        "U16" => Dtype::U16,
        "F16" => Dtype::F16,
        "BF16" => Dtype::BF16,
        "I32" => Dtype::I32,
        "U32" => Dtype::U32,
        "F32" => Dtype::F32,
        "C64" => Dtype::C64,
        "F64" => Dtype::F64,
        "I64" => Dtype::I64,
        "U64" => Dtype::U64,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_the_official_library_prints() {
        let names = "BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 F16 BF16 I32 \
                     U32 F32 C64 F64 I64 U64";
        let found: Vec<_> = names.split_whitespace().filter_map(dtype_from_name).collect();
        assert_eq!(found.len(), 22);
        for (name, dtype) in names.split_whitespace().zip(found) {
            assert_eq!(dtype.to_string(), name);
        }
        assert_eq!(dtype_from_name("bf16"), None);
    }
}
