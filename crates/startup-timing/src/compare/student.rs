//! Student's distribution: how sure a difference of means is.

/// The probability that a value of this distribution lies outside ±`t`.
pub(super) fn outside(t: f64, freedom: f64) -> f64 {
    if t.is_nan() {
        return 1.0;
    }
    incomplete_beta(freedom / (freedom + t * t), freedom / 2.0, 0.5)
}

/// The `t` for which a value lies inside ±`t` with probability `confidence`.
pub(super) fn quantile(confidence: f64, freedom: f64) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    while outside(high, freedom) > 1.0 - confidence && high < 1e12 {
        high *= 2.0;
    }
    for _ in 0..100 {
        let middle = f64::midpoint(low, high);
        if outside(middle, freedom) > 1.0 - confidence { low = middle } else { high = middle }
    }
    high
}

/// The regularized incomplete beta function, by its continued fraction (Lentz's method).
fn incomplete_beta(x: f64, a: f64, b: f64) -> f64 {
    if x <= 0.0 {
        return 0.0;
    }
    if x >= 1.0 {
        return 1.0;
    }
    let front = (ln_gamma(a + b) - ln_gamma(a) - ln_gamma(b) + a * x.ln() + b * (1.0 - x).ln()).exp();
    // The fraction converges quickly on one side of the middle; the other is its mirror image.
    if x < (a + 1.0) / (a + b + 2.0) {
        front * fraction(x, a, b) / a
    } else {
        1.0 - front * fraction(1.0 - x, b, a) / b
    }
}

#[expect(clippy::many_single_char_names, reason = "the method's own letters")]
fn fraction(x: f64, a: f64, b: f64) -> f64 {
    const TINY: f64 = 1e-300;
    let bounded = |value: f64| if value.abs() < TINY { TINY } else { value };
    let mut c = 1.0;
    let mut d = 1.0 / bounded(1.0 - (a + b) * x / (a + 1.0));
    let mut result = d;
    for step in 1..300 {
        let m = f64::from(step);
        for term in [
            m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0)),
        ] {
            d = 1.0 / bounded(1.0 + term * d);
            c = bounded(1.0 + term / c);
            result *= c * d;
        }
        if (c * d - 1.0).abs() < 1e-15 {
            break;
        }
    }
    result
}

/// The logarithm of the gamma function, by Stirling's series.
fn ln_gamma(x: f64) -> f64 {
    let (mut x, mut shift) = (x, 0.0);
    while x < 10.0 {
        shift += x.ln();
        x += 1.0;
    }
    let inverse = 1.0 / (x * x);
    let series = (1.0 / 12.0 - inverse * (1.0 / 360.0 - inverse * (1.0 / 1260.0 - inverse / 1680.0))) / x;
    (x - 0.5) * x.ln() - x + 0.5 * (2.0 * std::f64::consts::PI).ln() + series - shift
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_values_of_printed_tables() {
        for (confidence, freedom, t) in [
            (0.95, 1.0, 12.706_204_736),
            (0.95, 4.0, 2.776_445_105),
            (0.99, 10.0, 3.169_272_673),
            (0.9, 30.0, 1.697_260_887),
            (0.999, 120.0, 3.373_453_769),
        ] {
            assert!((quantile(confidence, freedom) - t).abs() < 1e-6, "{confidence} {freedom}");
            assert!((outside(t, freedom) - (1.0 - confidence)).abs() < 1e-8, "{confidence} {freedom}");
        }
    }

    #[test]
    fn the_ends() {
        assert!((outside(0.0, 3.0) - 1.0).abs() < 1e-12);
        assert!(outside(1e9, 3.0) < 1e-12);
        assert!((outside(f64::NAN, 3.0) - 1.0).abs() < 1e-12);
        assert!(outside(f64::INFINITY, 3.0) < 1e-12);
    }
}
