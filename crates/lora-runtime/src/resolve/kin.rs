//! Layers that some models keep as one and others apart: which names stand for the same rows.

use super::split_map::SplitMap;

/// How rows are shared between the parts, where only some of them are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Share {
    /// Queries, then keys and values of equal size.
    Attention,
    /// Queries, keys and values of equal size, then the rest.
    AttentionAndRest,
    /// Equal parts.
    Equal,
    /// Nothing is known.
    Unknown,
}

/// A fused layer of this name and parts of these.
struct Kin {
    fused: &'static [&'static str],
    parts: &'static [&'static [&'static str]],
    share: Share,
}

const KIN: &[Kin] = &[
    Kin {
        fused: &[
            "qkv",
            "to_qkv",
            "qkv_proj",
            "attn_qkv",
            "in_proj",
            "wqkv",
            "Wqkv",
            "query_key_value",
            "c_attn",
        ],
        parts: &[
            &["to_q", "to_k", "to_v"],
            &["q", "k", "v"],
            &["q_proj", "k_proj", "v_proj"],
            &["query", "key", "value"],
            &["wq", "wk", "wv"],
            &["q_linear", "k_linear", "v_linear"],
        ],
        share: Share::Attention,
    },
    Kin {
        fused: &["add_qkv", "to_added_qkv", "added_qkv", "add_qkv_proj", "added_qkv_proj"],
        parts: &[&["add_q_proj", "add_k_proj", "add_v_proj"], &["to_added_q", "to_added_k", "to_added_v"]],
        share: Share::Attention,
    },
    Kin {
        fused: &["kv", "to_kv", "kv_proj", "kv_linear", "wkv"],
        parts: &[&["to_k", "to_v"], &["k", "v"], &["k_proj", "v_proj"], &["key", "value"], &["wk", "wv"]],
        share: Share::Equal,
    },
    Kin {
        fused: &["gate_up_proj", "gate_up", "w13"],
        parts: &[&["gate_proj", "up_proj"], &["w1", "w3"]],
        share: Share::Equal,
    },
    Kin {
        fused: &["linear1", "to_qkv_mlp_proj", "attn_to_qkv_mlp_proj"],
        parts: &[
            &["to_q", "to_k", "to_v", "proj_mlp"],
            &["attn_to_q", "attn_to_k", "attn_to_v", "proj_mlp"],
            &["q", "k", "v", "mlp"],
            &["attn_q", "attn_k", "attn_v", "mlp"],
            &["linear1_q", "linear1_k", "linear1_v", "linear1_mlp"],
            &["linear1_attn_q", "linear1_attn_k", "linear1_attn_v", "linear1_mlp"],
            &["q_proj", "k_proj", "v_proj", "mlp"],
            &["q_proj", "k_proj", "v_proj", "proj_mlp"],
        ],
        share: Share::AttentionAndRest,
    },
];

/// A fused layer beside its parts, all within one module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Relation {
    /// The fused layer's flattened name.
    pub(crate) fused: String,
    /// The flattened names of its parts, in the order of their rows.
    pub(crate) parts: Vec<String>,
    /// Rows of each part, if the caller gave them.
    pub(crate) sizes: Option<Vec<u64>>,
    pub(crate) share: Share,
}

fn joined(parent: &str, name: &str) -> String {
    if parent.is_empty() { name.to_owned() } else { format!("{parent}_{name}") }
}

/// What stands in front of a name's last words, if they are these.
fn before<'a>(flat: &'a str, last: &str) -> Option<&'a str> {
    let rest = flat.strip_suffix(last)?;
    if rest.is_empty() { Some("") } else { rest.strip_suffix('_') }
}

/// Every relation in which a flattened name is the fused layer; the caller's own come alone where there are any.
pub(crate) fn as_fused(flat: &str, map: &SplitMap) -> Vec<Relation> {
    let own: Vec<_> = map
        .rules
        .iter()
        .filter_map(|rule| {
            let parent = before(flat, &rule.fused)?;
            Some(Relation {
                fused: flat.to_owned(),
                parts: rule.parts.iter().map(|part| joined(parent, part)).collect(),
                sizes: rule.sizes.clone(),
                share: Share::Unknown,
            })
        })
        .collect();
    if !own.is_empty() {
        return own;
    }
    let mut found = Vec::new();
    for kin in KIN {
        for parent in kin.fused.iter().filter_map(|fused| before(flat, fused)) {
            found.extend(kin.parts.iter().map(|parts| Relation {
                fused: flat.to_owned(),
                parts: parts.iter().map(|part| joined(parent, part)).collect(),
                sizes: None,
                share: kin.share,
            }));
        }
    }
    found
}

/// Every relation in which a flattened name is a part, with its number among the parts.
pub(crate) fn as_part(flat: &str, map: &SplitMap) -> Vec<(Relation, usize)> {
    let mut own = Vec::new();
    for rule in &map.rules {
        for (number, part) in rule.parts.iter().enumerate() {
            if let Some(parent) = before(flat, part) {
                let parts = rule.parts.iter().map(|part| joined(parent, part)).collect();
                let relation = Relation {
                    fused: joined(parent, &rule.fused),
                    parts,
                    sizes: rule.sizes.clone(),
                    share: Share::Unknown,
                };
                own.push((relation, number));
            }
        }
    }
    if !own.is_empty() {
        return own;
    }
    let mut found = Vec::new();
    for kin in KIN {
        for parts in kin.parts {
            for (number, part) in parts.iter().enumerate() {
                let Some(parent) = before(flat, part) else { continue };
                found.extend(kin.fused.iter().map(|fused| {
                    let parts = parts.iter().map(|part| joined(parent, part)).collect();
                    (Relation { fused: joined(parent, fused), parts, sizes: None, share: kin.share }, number)
                }));
            }
        }
    }
    found
}

/// Rows of every part, from those that are known and the rows of all together.
pub(crate) fn sizes(share: Share, known: &[Option<u64>], total: u64) -> Option<Vec<u64>> {
    let first = |parts: &[Option<u64>]| parts.iter().flatten().next().copied();
    let guess: Vec<u64> = match (share, known) {
        (_, all) if all.iter().all(Option::is_some) => all.iter().flatten().copied().collect(),
        (Share::Equal, all) => vec![total / all.len() as u64; all.len()],
        (Share::Attention, [q, k, v]) => {
            let pair = match (first(&[*k, *v]), q) {
                (Some(pair), _) => pair,
                (None, Some(q)) => total.checked_sub(*q)? / 2,
                (None, None) => total / 3,
            };
            vec![total.checked_sub(pair.checked_mul(2)?)?, pair, pair]
        }
        (Share::AttentionAndRest, [q, k, v, rest]) => {
            let head = match (first(&[*q, *k, *v]), rest) {
                (Some(head), _) => head,
                (None, Some(rest)) => total.checked_sub(*rest)? / 3,
                (None, None) => return None,
            };
            vec![head, head, head, total.checked_sub(head.checked_mul(3)?)?]
        }
        _ => return None,
    };
    let sum = guess.iter().try_fold(0_u64, |sum, n| sum.checked_add(*n))?;
    let agrees = guess.iter().zip(known).all(|(n, known)| *n > 0 && known.is_none_or(|known| known == *n));
    (sum == total && agrees).then_some(guess)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_directions_name_the_same_rows() {
        let map = SplitMap::default();
        let fused = as_fused("single_blocks_0_linear1", &map);
        assert!(
            fused
                .iter()
                .any(|r| r.parts[3] == "single_blocks_0_proj_mlp" && r.parts[0] == "single_blocks_0_to_q")
        );
        let parts = as_part("blocks_0_attn_to_k", &map);
        assert!(parts.iter().any(|(r, n)| r.fused == "blocks_0_attn_qkv" && *n == 1));
        assert!(as_fused("blocks_0_xqkv", &map).is_empty());
        assert!(as_part("q", &map).iter().any(|(r, _)| r.fused == "qkv"));
    }

    #[test]
    fn rows_that_nobody_gave_are_found_or_not_at_all() {
        let found = |share, known: &[Option<u64>], total| sizes(share, known, total);
        assert_eq!(found(Share::Attention, &[None, Some(8), None], 32), Some(vec![16, 8, 8]));
        assert_eq!(found(Share::Attention, &[Some(16), None, None], 32), Some(vec![16, 8, 8]));
        assert_eq!(found(Share::Attention, &[Some(16), Some(8), Some(9)], 33), Some(vec![16, 8, 9]));
        assert_eq!(found(Share::Attention, &[Some(15), None, None], 32), None);
        assert_eq!(found(Share::AttentionAndRest, &[None, Some(8), None, None], 56), Some(vec![8, 8, 8, 32]));
        assert_eq!(
            found(Share::AttentionAndRest, &[None, None, None, Some(32)], 56),
            Some(vec![8, 8, 8, 32])
        );
        assert_eq!(found(Share::AttentionAndRest, &[None, Some(28), None, None], 56), None);
        assert_eq!(found(Share::Unknown, &[Some(1), None], 3), None);
        assert_eq!(found(Share::Attention, &[None, Some(u64::MAX), None], 32), None);
    }
}
