//! The rotation of `ConvRot`: groups of columns times a regular Hadamard matrix.

/// Whether groups of so many columns can be rotated: a power of four, from four on.
pub fn is_rotatable(group: u64) -> bool {
    group >= 4 && group.is_power_of_two() && group.trailing_zeros().is_multiple_of(2)
}

/// Rotates rows in place, group by group: times the regular Hadamard matrix of the group's size, which is the Kronecker power of
///
/// ```text
///  1  1  1 -1
///  1  1 -1  1
///  1 -1  1  1        divided by the square root of the size
/// -1  1  1  1
/// ```
///
/// It is its own inverse, and turns weights that are kept rotated back. Numbers behind the last whole group stay; a group that
/// cannot be rotated changes nothing.
pub fn rotate(numbers: &mut [f32], group: u64) {
    if !is_rotatable(group) {
        return;
    }
    let factor = 1.0 / (group as f32).sqrt();
    for group in numbers.chunks_exact_mut(group as usize) {
        let mut stride = 1;
        while stride < group.len() {
            for start in (0..group.len()).step_by(4 * stride) {
                for at in start..start + stride {
                    let [a, b, c, d] = [0, 1, 2, 3].map(|i| group[at + i * stride]);
                    group[at] = a + b + c - d;
                    group[at + stride] = a + b - c + d;
                    group[at + 2 * stride] = a - b + c + d;
                    group[at + 3 * stride] = -a + b + c + d;
                }
            }
            stride *= 4;
        }
        for number in group {
            *number *= factor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{is_rotatable, rotate};

    #[test]
    fn sizes_are_powers_of_four() {
        let sizes: Vec<u64> = (0..=1024).filter(|&size| is_rotatable(size)).collect();
        assert_eq!(sizes, [4, 16, 64, 256, 1024]);
    }

    #[test]
    fn a_rotation_is_the_matrix_and_its_own_inverse() {
        const H4: [[i32; 4]; 4] = [[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]];
        for group in [4_usize, 16, 64, 256] {
            let row: Vec<f32> = (0..group * 3).map(|i| ((i * 37 + 11) % 101) as f32 - 50.0).collect();
            let mut rotated = row.clone();
            rotate(&mut rotated, group as u64);
            for (index, &have) in rotated.iter().enumerate() {
                let (start, column) = (index / group * group, index % group);
                let want: f64 = (0..group)
                    .map(|k| {
                        let (mut sign, mut i, mut j) = (1, k, column);
                        while i > 0 || j > 0 {
                            sign *= H4[i % 4][j % 4];
                            (i, j) = (i / 4, j / 4);
                        }
                        // Digits above the highest that is not zero meet the corner, which is 1.
                        f64::from(sign) * f64::from(row[start + k])
                    })
                    .sum::<f64>()
                    / (group as f64).sqrt();
                assert!((f64::from(have) - want).abs() < 1e-3, "{group} {index}: {have} {want}");
            }
            rotate(&mut rotated, group as u64);
            assert!(rotated.iter().zip(&row).all(|(a, b)| (a - b).abs() < 1e-3));
        }
        let mut odd = [1.0, 2.0, 3.0];
        rotate(&mut odd, 8);
        assert!(odd.iter().zip([1.0, 2.0, 3.0]).all(|(a, b)| (a - b).abs() < 1e-9));
    }
}
