//! Handlers: an application's own, their order, and clashes.

use quant_router::detect::{Described, Evidence, Handler, Handlers};
use quant_router::formats::{Codes, Family, Global, Scaled, Scales};
use quant_router::{Format, Part, PartRole, QuantError, QuantWeight, Result};

use super::build::File;

/// Takes weights whose names begin in some way, as FP8 without scales.
#[derive(Debug)]
struct Own(&'static str, u32, &'static str);

impl Handler for Own {
    fn name(&self) -> &str {
        self.0
    }

    fn priority(&self) -> u32 {
        self.1
    }

    fn detect(&self, evidence: &Evidence<'_>) -> Vec<String> {
        let tensors = evidence.header().tensors();
        let own =
            tensors.filter(|tensor| tensor.name.starts_with(self.2) && tensor.name.ends_with(".weight"));
        own.map(|tensor| tensor.name.clone()).collect()
    }

    fn describe(&self, evidence: &Evidence<'_>, weight: &str) -> Result<Described> {
        let data = evidence.header().get(weight).unwrap();
        let (family, codes) = (Family::Fp8, Codes::E4m3);
        let format = Format::Scaled(Scaled {
            family,
            codes,
            scales: Scales::None,
            global: Global::None,
            zero_point: false,
        });
        let parts = vec![Part::of(PartRole::Data, data)];
        let weight = QuantWeight {
            name: weight.into(),
            shape: data.shape.clone(),
            format,
            parts,
            transforms: Vec::new(),
        };
        let mut described = Described::new(weight);
        described.hints = evidence.header().beginning(&data.name).skip(1).map(|t| t.name.clone()).collect();
        Ok(described)
    }
}

fn file() -> File {
    File::default()
        .tensor("a.weight", "F8_E4M3", &[4, 4])
        .tensor("a.weight_scale", "F32", &[])
        .tensor("b.weight", "F8_E4M3", &[4, 4])
        .tensor("b.weight_scale", "F32", &[])
}

fn with(own: Vec<Own>) -> Vec<(String, String)> {
    let mut handlers = Handlers::default();
    for own in own {
        handlers.add(Box::new(own));
    }
    let detection = file().detect_with(&handlers).unwrap();
    detection.weights.into_iter().map(|(name, found)| (name, found.handler)).collect()
}

#[test]
fn the_smallest_priority_takes_a_weight_and_the_others_keep_theirs() {
    let names = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
        pairs.iter().map(|(name, handler)| ((*name).into(), (*handler).into())).collect()
    };
    assert_eq!(with(vec![Own("own", 1000, "a")]), names(&[("a.weight", "fp8"), ("b.weight", "fp8")]));
    assert_eq!(with(vec![Own("own", 0, "a")]), names(&[("a.weight", "own"), ("b.weight", "fp8")]));
    // Among equals, the first one registered.
    assert_eq!(
        with(vec![Own("one", 5, "a"), Own("two", 5, "")]),
        names(&[("a.weight", "one"), ("b.weight", "two")])
    );
}

#[test]
fn handlers_are_taken_away_by_name() {
    let mut handlers = Handlers::default();
    let names = handlers.names().join(" ");
    assert!(names.starts_with("nvfp4 "), "{names}");
    assert!(handlers.remove("fp8") && !handlers.remove("fp8"));
    // What the handler would have taken is now a sign of something unknown.
    let error = file().detect_with(&handlers).unwrap_err();
    assert!(matches!(error, QuantError::NotUnderstood { .. }));
    let plain = File::default().tensor("a.weight", "F32", &[2]).detect_with(&Handlers::none()).unwrap();
    assert_eq!(plain.plain.len(), 1);
}

#[test]
fn detection_of_ggml_blocks() {
    use checkpoint::gguf::GgmlType;
    use checkpoint::{TensorInfo, TensorType};
    use quant_router::detect::Header;
    let tensor =
        |name: &str, kind| TensorInfo { name: name.into(), kind, shape: vec![4, 64], file: 0, range: 0..0 };
    let tensors = [
        tensor("blk.0.attn_q.weight", TensorType::Ggml(GgmlType::Q8_0)),
        tensor("blk.1.attn_q.weight", TensorType::Ggml(GgmlType::Q4_0)),
    ];
    let metadata = std::collections::BTreeMap::new();
    let read = |_: &TensorInfo| -> std::io::Result<Vec<u8>> { panic!("read") };
    let detection = Handlers::default().detect(&Header::new(&tensors, &metadata, &read)).unwrap();
    let formats: Vec<_> = detection.weights.values().map(|found| found.weight.format.to_string()).collect();
    assert_eq!(formats, ["Q8_0", "Q4_0"]);
}

#[test]
fn claims_name_who_would_describe_each_weight_and_describe_none() {
    // Its scales have the wrong shape, which only a description finds.
    let file = File::default().tensor("a.weight", "F8_E4M3", &[4, 4]).tensor("a.weight_scale", "F32", &[3]);
    let claims = file.claims(&Handlers::default());
    assert_eq!(claims["a.weight"], ("fp8".into(), 10));
    file.refused("a.weight");
    let mut handlers = Handlers::default();
    handlers.add(Box::new(Own("own", 1, "a")));
    assert_eq!(file.claims(&handlers)["a.weight"], ("own".into(), 1));
    let priorities: Vec<u32> = handlers.priorities().map(|(_, priority)| priority).collect();
    assert!(priorities.is_sorted() && priorities.len() == handlers.names().len());
}
