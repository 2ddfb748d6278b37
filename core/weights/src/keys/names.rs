//! Dotted names, searched by prefix.

/// A sorted list of names with binary search.
#[derive(Clone, Debug)]
pub(crate) struct Names<'a>(Vec<&'a str>);

impl<'a> FromIterator<&'a str> for Names<'a> {
    fn from_iter<I: IntoIterator<Item = &'a str>>(names: I) -> Self {
        let mut sorted: Vec<&str> = names.into_iter().collect();
        sorted.sort_unstable();
        sorted.dedup();
        Names(sorted)
    }
}

impl<'a> Names<'a> {
    /// Whether exactly this name exists.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.binary_search(&name).is_ok()
    }

    /// Whether any name begins with `prefix`.
    pub(crate) fn any(&self, prefix: &str) -> bool {
        let at = self.0.partition_point(|name| *name < prefix);
        self.0.get(at).is_some_and(|name| name.starts_with(prefix))
    }

    /// One more than the largest index `i` for which there are names that begin with `prefix.i.`.
    ///
    /// Gaps are allowed, because layers without weights have numbers too, and the user of a damaged file should learn what it
    /// lacks. Far more gaps than indices are not, so the work stays proportional to the number of names for any numbers in them.
    pub(crate) fn count(&self, prefix: &str) -> usize {
        let (mut count, mut hits, mut misses) = (0, 0, 0);
        for index in 0.. {
            if self.any(&format!("{prefix}.{index}.")) {
                hits += 1;
                count = index + 1;
            } else {
                misses += 1;
                if misses > hits + 1 {
                    break;
                }
            }
        }
        count
    }

    /// All names, sorted.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &'a str> {
        self.0.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_by_prefix_and_counted() {
        let names: Names = ["a.0.x", "a.1.x", "a.10.x", "b", "b.0", "c.5.x", "d.1.x", "d.3.x", "a.1.x"]
            .into_iter()
            .collect();
        assert_eq!(names.iter().count(), 8);
        assert!(names.has("b") && !names.has("a"));
        assert!(names.any("a.1") && names.any("b") && names.any("") && !names.any("a.2") && !names.any("e"));
        // Two indices do not reach 10; one hole each is allowed; a last part is no index.
        assert_eq!(["a", "b", "c", "d", "e"].map(|prefix| names.count(prefix)), [2, 0, 0, 4, 0]);
        assert!(!Names::from_iter([]).any(""));
    }
}
