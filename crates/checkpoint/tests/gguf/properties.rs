//! Random files read as they were meant; random damage never reads as something a naive check refuses.

use std::collections::BTreeMap;

use checkpoint::FileHeader;
use checkpoint::gguf::{GgmlType, GgufHeader, Value};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::build::{Bytes, read};

/// A tensor to be written: name, type, dimensions fastest first.
type Meant = (String, GgmlType, Vec<u64>);

fn tensors() -> impl Strategy<Value = Vec<Meant>> {
    let kind = proptest::sample::select(GgmlType::all().collect::<Vec<_>>());
    let dims = proptest::collection::vec(0_u64..4, 0..4);
    let tensor = (kind, dims).prop_map(|(kind, mut dims)| {
        match dims.first_mut() {
            Some(first) => *first *= kind.block_elements(),
            None => dims.push(kind.block_elements()),
        }
        (kind, dims)
    });
    proptest::collection::vec(("[a-z.é]{0,12}", tensor), 0..8).prop_map(|list| {
        let named: BTreeMap<_, _> = list.into_iter().collect();
        named.into_iter().map(|(name, (kind, dims))| (name, kind, dims)).collect()
    })
}

fn values() -> impl Strategy<Value = BTreeMap<String, Value>> {
    let value = prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i64>().prop_map(Value::I64),
        any::<bool>().prop_map(Value::Bool),
        (-1e9_f64..1e9).prop_map(Value::F64),
        ".{0,20}".prop_map(Value::Text),
    ];
    proptest::collection::btree_map("[a-z_]{0,9}", value, 0..6)
}

fn write_value(file: Bytes, value: &Value) -> Bytes {
    match value {
        Value::U8(value) => file.u32(0).raw(&[*value]),
        Value::I16(value) => file.u32(3).raw(&value.to_le_bytes()),
        Value::U32(value) => file.u32(4).u32(*value),
        Value::Bool(value) => file.u32(7).raw(&[u8::from(*value)]),
        Value::Text(text) => file.u32(8).text(text),
        Value::I64(value) => file.u32(11).raw(&value.to_le_bytes()),
        Value::F64(value) => file.u32(12).raw(&value.to_le_bytes()),
        other => panic!("not generated: {other:?}"),
    }
}

fn bytes_of((_, kind, dims): &Meant) -> u64 {
    dims.iter().product::<u64>() / kind.block_elements() * kind.block_bytes()
}

/// A file with these tensors one after the other, `gap` alignments between them, listed in reverse; those without bytes
/// all at the start. Also where each tensor is.
fn write(tensors: &[Meant], values: &BTreeMap<String, Value>, alignment: u32, gap: u64) -> (Bytes, Vec<u64>) {
    let mut file = Bytes::file(tensors.len() as u64, values.len() as u64 + 1);
    file = file.entry_u32("general.alignment", alignment);
    for (key, value) in values {
        file = write_value(file.text(key), value);
    }
    let (mut offsets, mut end) = (Vec::new(), 0_u64);
    for tensor in tensors {
        if bytes_of(tensor) == 0 {
            offsets.push(0);
            continue;
        }
        end += gap * u64::from(alignment);
        offsets.push(end);
        end = (end + bytes_of(tensor)).next_multiple_of(alignment.into());
    }
    for ((name, kind, dims), offset) in tensors.iter().zip(&offsets).rev() {
        file = file.tensor(name, dims, kind.number(), *offset);
    }
    let file = file.pad(alignment as usize);
    let data_start = file.0.len() as u64;
    (file.zeros(end as usize), offsets.iter().map(|offset| data_start + offset).collect())
}

/// What must hold of whatever is accepted, computed from nothing but the result.
fn check_sane(bytes: &[u8], header: &FileHeader, gguf: &GgufHeader) {
    let mut taken: Vec<_> = header.tensors.iter().map(|tensor| tensor.range.clone()).collect();
    for tensor in &header.tensors {
        assert!(tensor.range.start >= header.data_start && tensor.range.end <= bytes.len() as u64);
        assert_eq!((tensor.range.start - header.data_start) % gguf.alignment, 0);
        let kind = GgmlType::all().find(|kind| kind.name() == tensor.kind.to_string()).unwrap();
        let stored = gguf.stored_shape(&tensor.name).unwrap_or(&tensor.shape);
        let elements: u128 = stored.iter().map(|dim| u128::from(*dim)).product();
        let wanted = elements / u128::from(kind.block_elements()) * u128::from(kind.block_bytes());
        assert_eq!(u128::from(tensor.bytes()), wanted);
        assert_eq!(tensor.shape.iter().product::<u64>(), stored.iter().product::<u64>());
    }
    taken.retain(|range| !range.is_empty());
    taken.sort_by_key(|range| range.start);
    assert!(taken.windows(2).all(|pair| pair[0].end <= pair[1].start));
    let names: std::collections::BTreeSet<_> = header.tensors.iter().map(|tensor| &tensor.name).collect();
    assert_eq!(names.len(), header.tensors.len());
    assert!(header.data_start.is_multiple_of(gguf.alignment) && gguf.alignment.is_power_of_two());
}

proptest! {
    #[test]
    fn files_are_read_as_they_were_meant(
        tensors in tensors(), values in values(), shift in 0_u32..8, gap in 0_u64..2, extra in 1_usize..3,
    ) {
        let (file, places) = write(&tensors, &values, 1 << shift, gap);
        let (header, gguf) = read(&file.0).unwrap();
        check_sane(&file.0, &header, &gguf);
        prop_assert_eq!(header.tensors.len(), tensors.len());
        for ((name, kind, dims), place) in tensors.iter().zip(&places) {
            let found = header.tensors.iter().find(|tensor| tensor.name == *name).unwrap();
            let shape: Vec<_> = dims.iter().rev().copied().collect();
            prop_assert_eq!(&found.shape, &shape);
            prop_assert_eq!(found.kind.to_string(), kind.name());
            prop_assert_eq!(found.range.start, *place);
        }
        for (key, value) in &values {
            prop_assert_eq!(gguf.get(key), Some(value));
        }
        let said = read(&file.zeros(extra).0).unwrap_err().to_string();
        prop_assert!(said.contains(&format!("{extra} bytes follow its last tensor")), "{said}");
    }

    #[test]
    fn damage_is_refused_or_harmless(
        tensors in tensors(), values in values(), cut in proptest::option::of(any::<Index>()),
        hits in proptest::collection::vec((any::<Index>(), prop_oneof![Just(0_u8), Just(0xFF), any::<u8>()]), 0..6),
    ) {
        let (file, _) = write(&tensors, &values, 32, 0);
        let mut bytes = file.0;
        // Hits go where the structure is, mostly.
        let header = bytes.len().min(300);
        for (place, byte) in hits {
            bytes[place.index(header)] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok((header, gguf)) = read(&bytes) {
            check_sane(&bytes, &header, &gguf);
        }
    }

    #[test]
    fn noise_is_refused(noise: Vec<u8>) {
        let file = Bytes(b"GGUF\x03\0\0\0".to_vec()).raw(&noise).0;
        if let Ok((header, gguf)) = read(&file) {
            check_sane(&file, &header, &gguf);
        }
    }
}
