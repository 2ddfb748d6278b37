//! The beta distribution, for the schedule of that name.

/// The quantile of probability `p`, by bisection.
pub(super) fn quantile(p: f64, a: f64, b: f64) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..64 {
        let middle = 0.5 * (low + high);
        if distribution(middle, a, b) < p { low = middle } else { high = middle }
    }
    0.5 * (low + high)
}

/// The regularized incomplete beta function `I_x(a, b)`, by its continued fraction (Numerical Recipes, 6.4).
fn distribution(x: f64, a: f64, b: f64) -> f64 {
    if x <= 0.0 || x >= 1.0 {
        return x.clamp(0.0, 1.0);
    }
    let scale = (a * x.ln() + b * (1.0 - x).ln() - ln_beta(a, b)).exp();
    if x < (a + 1.0) / (a + b + 2.0) {
        scale * fraction(x, a, b) / a
    } else {
        1.0 - scale * fraction(1.0 - x, b, a) / b
    }
}

/// The continued fraction, by Lentz's method.
fn fraction(x: f64, a: f64, b: f64) -> f64 {
    const TINY: f64 = 1e-300;
    let away_from_zero = |value: f64| if value.abs() < TINY { TINY } else { value };
    let mut c = 1.0;
    let mut d = 1.0 / away_from_zero(1.0 - (a + b) * x / (a + 1.0));
    let mut result = d;
    for m in 1..200 {
        let m = f64::from(m);
        let even = m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m));
        let odd = -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0));
        let mut change = 1.0;
        for term in [even, odd] {
            d = 1.0 / away_from_zero(1.0 + term * d);
            c = away_from_zero(1.0 + term / c);
            change = c * d;
            result *= change;
        }
        if (change - 1.0).abs() < 1e-15 {
            break;
        }
    }
    result
}

/// `ln B(a, b)`.
fn ln_beta(a: f64, b: f64) -> f64 {
    ln_gamma(a) + ln_gamma(b) - ln_gamma(a + b)
}

/// `ln Γ(x)` for positive `x`, by Stirling's series at an argument of at least 10. The error is below 1e-13.
fn ln_gamma(mut x: f64) -> f64 {
    let mut product = 1.0;
    while x < 10.0 {
        product *= x;
        x += 1.0;
    }
    let inverse = 1.0 / x;
    let square = inverse * inverse;
    let series = inverse
        * (1.0 / 12.0
            - square * (1.0 / 360.0 - square * (1.0 / 1260.0 - square * (1.0 / 1680.0 - square / 1188.0))));
    (x - 0.5) * x.ln() - x + 0.5 * std::f64::consts::TAU.ln() + series - product.ln()
}

#[cfg(test)]
mod tests {
    use super::{distribution, ln_gamma, quantile};
    use std::f64::consts::PI;

    #[test]
    fn gamma_at_known_points() {
        assert!((ln_gamma(0.5) - PI.sqrt().ln()).abs() < 1e-13);
        assert!(ln_gamma(1.0).abs() < 1e-13);
        assert!((ln_gamma(6.0) - 120f64.ln()).abs() < 1e-12);
    }

    /// `I_x(a, 1) = x^a`, the arcsine law for a = b = ½, and symmetry.
    #[test]
    fn distribution_in_closed_forms() {
        for x in [0.01, 0.2, 0.5, 0.77, 0.99] {
            assert!((distribution(x, 0.6, 1.0) - x.powf(0.6)).abs() < 1e-13);
            assert!((distribution(x, 0.5, 0.5) - 2.0 / PI * x.sqrt().asin()).abs() < 1e-13);
            assert!((distribution(x, 0.6, 0.9) + distribution(1.0 - x, 0.9, 0.6) - 1.0).abs() < 1e-13);
            assert!((quantile(distribution(x, 0.6, 0.6), 0.6, 0.6) - x).abs() < 1e-13);
        }
    }
}
