//! What files say of their layers: empty, wiped out, unreadable and contradictory. Seen at
//! <https://github.com/Comfy-Org/ComfyUI/issues/15400> and <https://github.com/Comfy-Org/ComfyUI/issues/15567>.

use quant_router::QuantError;

use super::build::{File, format};

#[test]
fn a_marker_without_words_is_none() {
    let file = File::default()
        .tensor("model.embed_tokens.weight", "BF16", &[64, 32])
        .marker("model.embed_tokens.comfy_quant", &[0; 29])
        .tensor("a.weight", "BF16", &[4, 4])
        .marker("a.comfy_quant", &[])
        .tensor("b.weight", "F8_E4M3", &[4, 4])
        .tensor("b.weight_scale", "F32", &[])
        .marker("b.comfy_quant", br#"{"full_precision_matrix_mult": true}"#)
        .tensor("c.weight", "F8_E4M3", &[4, 4])
        .tensor("c.weight_scale", "F32", &[])
        .marker("c.comfy_quant", &[0; 29]);
    let detection = file.detect().unwrap();
    assert_eq!(detection.plain.iter().collect::<Vec<_>>(), ["a.weight", "model.embed_tokens.weight"]);
    for layer in ["b.weight", "c.weight"] {
        assert_eq!(format(&detection, layer), "FP8 with one scale");
    }
    let file = file.tensor("d.weight", "F8_E4M3", &[4, 4]).marker("d.comfy_quant", &[0; 29]);
    assert!(matches!(file.refused("d.weight"), QuantError::NoScale { .. }));
}

#[test]
fn a_marker_alone_asks_for_a_scale() {
    let file = File::default().tensor("d.weight", "F8_E4M3", &[4, 4]).marker("d.comfy_quant", &[0; 3]);
    assert!(matches!(file.refused("d.weight"), QuantError::NoScale { .. }));
}

#[test]
fn unreadable_markers_are_refused_on_any_weight() {
    for dtype in ["BF16", "F8_E4M3", "I8"] {
        for marker in [&b"\xff\xfe{"[..], b"[1, 2]", b"{\"format\": ", b"{\"format\": 7}", b"\"nvfp4\""] {
            let file = File::default().tensor("e.weight", dtype, &[4, 4]).marker("e.comfy_quant", marker);
            let file = if dtype == "BF16" { file } else { file.tensor("e.weight_scale", "F32", &[]) };
            let error = file.refused("e.weight");
            assert!(matches!(error, QuantError::Marker { .. }), "{dtype} {marker:?}: {error}");
        }
    }
}

#[test]
fn words_that_tensors_contradict_are_refused() {
    for (says, dtype) in
        [("nvfp4", "BF16"), ("nvfp4", "F8_E4M3"), ("float8_e5m2", "F8_E4M3"), ("int3", "BF16")]
    {
        let text = format!(r#"{{"format": "{says}"}}"#);
        let file = File::default().tensor("a.weight", dtype, &[4, 4]);
        let file = if dtype == "BF16" { file } else { file.tensor("a.weight_scale", "F32", &[]) };
        let marked = file.clone().marker("a.comfy_quant", text.as_bytes());
        assert!(matches!(marked.refused("a.weight"), QuantError::Contradiction { .. }));
        let metadata = format!(r#"{{"layers": {{"a": {text}}}}}"#);
        let said = file.says("_quantization_metadata", &metadata);
        assert!(matches!(said.refused("a.weight"), QuantError::Contradiction { .. }));
    }
}

#[test]
fn metadata_speaks_of_layers_with_and_without_the_files_prefix() {
    let text = r#"{"format_version": "1.0", "layers": {"a": {"format": "mxfp8"}}}"#;
    for prefix in ["", "model.diffusion_model.", "diffusion_model.", "model."] {
        let weight = format!("{prefix}a.weight");
        let file = File::default().tensor(&weight, "F8_E4M3", &[128, 128]).tensor(
            &format!("{weight}_scale"),
            "U8",
            &[128, 4],
        );
        file.refused(&weight);
        let detection = file.says("_quantization_metadata", text).detect().unwrap();
        assert_eq!(format(&detection, &weight), "MXFP8 with a scale for 1 × 32");
    }
    for text in ["", "[]", "{\"layers\": 3}", "{"] {
        let file = File::default().tensor("a.weight", "BF16", &[4, 4]).says("_quantization_metadata", text);
        assert!(matches!(file.refused("*"), QuantError::Marker { .. }), "{text}");
    }
}

#[test]
fn signs_of_formats_that_are_not_known_are_refused() {
    for (sign, dtype) in [
        ("a.qzeros", "I32"),
        ("a.g_idx", "I32"),
        ("a.weight_packed", "I32"),
        ("a.weight_scale", "F32"),
        ("a.scale_weight", "F32"),
        ("a.weight.absmax", "U8"),
        ("a.weight.quant_state.bitsandbytes__xy4", "U8"),
    ] {
        let file = File::default().tensor("a.weight", "BF16", &[4, 4]).tensor(sign, dtype, &[4]);
        let error = file.refused("a.weight");
        assert!(matches!(error, QuantError::NotUnderstood { .. }), "{error}");
        assert!(error.to_string().contains(sign), "{error}");
    }
    // Names that plain models use.
    let plain = File::default().tensor("scales", "F32", &[4]).tensor("pe.scales", "F32", &[4]).tensor(
        "a._data",
        "F32",
        &[4],
    );
    assert_eq!(plain.detect().unwrap().plain.len(), 3);
}

#[test]
fn types_that_no_handler_knows_are_refused_where_they_are_scaled() {
    for dtype in ["F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "I16", "I32"] {
        let file = File::default().tensor("a.weight", dtype, &[16, 16]).tensor("a.weight_scale", "F32", &[]);
        assert!(matches!(file.refused("a.weight"), QuantError::NotUnderstood { .. }), "{dtype}");
    }
}

#[test]
fn a_configuration_that_cannot_be_read_concerns_only_layers_that_depend_on_it() {
    for broken in ["not Base64!", "ew==", "/w==", "e30"] {
        let broken = |file: File| file.says("config_base64", broken);
        let plain = File::default()
            .tensor("a.weight", "BF16", &[4, 4])
            .tensor("b.weight", "F8_E4M3", &[4, 4])
            .tensor("b.weight_scale", "F32", &[]);
        let detection = broken(plain).detect().unwrap();
        assert!(detection.plain.contains("a.weight"));
        assert_eq!(format(&detection, "b.weight"), "FP8 with one scale");
        let gptq = File::default()
            .tensor("c.qweight", "I32", &[16, 64])
            .tensor("c.qzeros", "I32", &[2, 8])
            .tensor("c.scales", "F16", &[2, 64]);
        let error = broken(gptq.clone()).refused("c.weight");
        assert!(matches!(&error, QuantError::Marker { tensor, .. } if tensor == "config_base64"), "{error}");
        // Said beside it, nothing is missing.
        broken(gptq).says("quantization_config", r#"{"quant_method": "gptq"}"#).detect().unwrap();
        let rows = File::default()
            .tensor("d.weight", "U8", &[8, 64])
            .tensor("d.weight_scale", "F8_E4M3", &[8, 8])
            .tensor("d.weight_scale_2", "F32", &[]);
        assert!(matches!(broken(rows).refused("d.weight"), QuantError::Marker { .. }));
    }
}
