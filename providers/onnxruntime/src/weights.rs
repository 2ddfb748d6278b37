//! How weights reach ONNX Runtime.
//!
//! ONNX Runtime can take weights from memory, all at once. It then copies them before it repacks them, which doubles
//! its peak memory. Or it takes them from files, one at a time, but only from a single folder. So weights that lie
//! unchanged in files of the folder that holds most of them are referenced there. The other weights are lent from
//! memory.

use sdrun_abi::{Host, Result, Weight, WeightSource, WeightSpec};
use sdrun_provider_common::{WeightFiles, phase, weight};
use std::{collections::HashMap, path::Path};

/// Where one session's weights come from.
pub(crate) struct Weights<'a> {
    /// The folder of the files, in UTF-8.
    pub(crate) folder: Option<String>,
    /// File name and offset of each weight in a file.
    pub(crate) in_files: HashMap<&'a str, (String, u64)>,
    /// Weights lent from memory while the session is created. Mapped ones take no memory; computed ones take their
    /// own size.
    pub(crate) lent: Vec<(&'a str, Weight<'a>)>,
}

impl<'a> Weights<'a> {
    /// Fetches every weight in `specs` from the source.
    pub(crate) fn take(
        specs: &'a [WeightSpec],
        source: &'a dyn WeightSource,
        host: &dyn Host,
    ) -> Result<Self> {
        let mut files = WeightFiles::default();
        let mut taken = Vec::with_capacity(specs.len());
        for (index, spec) in specs.iter().enumerate() {
            phase(host, "take weights", index as u64, specs.len() as u64)?;
            let weight = weight(source, spec)?;
            // Resolve links, because ONNX Runtime follows none out of the folder.
            let file = files
                .place(&spec.name, &weight)?
                .and_then(|(path, offset)| names(path).map(|(folder, name)| (folder, name, offset)));
            taken.push((spec.name.as_str(), weight, file));
        }
        let mut bytes_in: HashMap<&str, usize> = HashMap::new();
        for (_, weight, file) in &taken {
            if let Some((folder, ..)) = file {
                *bytes_in.entry(folder).or_default() += weight.data().len();
            }
        }
        let folder =
            bytes_in.into_iter().max_by_key(|(_, bytes)| *bytes).map(|(folder, _)| folder.to_string());
        let mut weights = Weights { folder, in_files: HashMap::new(), lent: Vec::new() };
        for (name, weight, file) in taken {
            match file {
                Some((of, file, offset)) if weights.folder.as_deref() == Some(&of) => {
                    weights.in_files.insert(name, (file, offset));
                }
                _ => weights.lent.push((name, weight)),
            }
        }
        Ok(weights)
    }
}

/// Folder and name of a file as text; `None` if either is not Unicode.
fn names(file: &Path) -> Option<(String, String)> {
    Some((file.parent()?.to_str()?.to_string(), file.file_name()?.to_str()?.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun_abi::{DType, NoHost};
    use std::path::PathBuf;

    struct Source(Vec<(PathBuf, u64)>);

    impl WeightSource for Source {
        /// Weight `i` has 10 · (i + 1) bytes and lies in file `i` if that exists.
        fn get(&self, name: &str) -> Result<Weight<'_>> {
            let i: usize = name.parse().unwrap();
            let bytes = 10 * (i + 1);
            let weight = Weight::new(DType::U8, vec![bytes], vec![0u8; bytes])?;
            Ok(match self.0.get(i) {
                Some((path, offset)) => weight.in_file(path.clone(), *offset),
                None => weight,
            })
        }
    }

    fn specs(n: usize) -> Vec<WeightSpec> {
        (0..n)
            .map(|i| WeightSpec { name: i.to_string(), dtype: DType::U8, shape: vec![10 * (i + 1)] })
            .collect()
    }

    #[test]
    fn the_fullest_folder_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let root = dunce::canonicalize(dir.path()).unwrap();
        for sub in ["a", "b"] {
            std::fs::create_dir(root.join(sub)).unwrap();
            std::fs::write(root.join(sub).join("w.bin"), [0u8; 100]).unwrap();
        }
        let (a, b) = (root.join("a/w.bin"), root.join("b/w.bin"));
        // 10 + 20 bytes in a, 40 in b, 30 in a missing file, 50 in memory.
        let source = Source(vec![(a.clone(), 1), (a, 2), (root.join("gone"), 3), (b, 4)]);
        let specs = specs(5);
        let weights = Weights::take(&specs, &source, &NoHost).unwrap();
        assert_eq!(weights.folder.as_deref(), root.join("b").to_str());
        assert_eq!(weights.in_files, HashMap::from([("3", ("w.bin".to_string(), 4))]));
        let lent: Vec<&str> = weights.lent.iter().map(|(name, _)| *name).collect();
        assert_eq!(lent, ["0", "1", "2", "4"]);
    }

    #[cfg(unix)]
    #[test]
    fn links_are_resolved() {
        let dir = tempfile::tempdir().unwrap();
        let root = dunce::canonicalize(dir.path()).unwrap();
        std::fs::create_dir_all(root.join("blobs")).unwrap();
        std::fs::write(root.join("blobs/real"), [0u8; 100]).unwrap();
        std::os::unix::fs::symlink("blobs/real", root.join("link")).unwrap();
        let specs = specs(1);
        let source = Source(vec![(root.join("link"), 7)]);
        let weights = Weights::take(&specs, &source, &NoHost).unwrap();
        assert_eq!(weights.folder.as_deref(), root.join("blobs").to_str());
        assert_eq!(weights.in_files["0"], ("real".to_string(), 7));
    }

    #[test]
    fn without_files_everything_is_lent() {
        let specs = specs(3);
        let source = Source(vec![]);
        let weights = Weights::take(&specs, &source, &NoHost).unwrap();
        assert!(weights.folder.is_none() && weights.in_files.is_empty());
        assert_eq!(weights.lent.len(), 3);
    }
}
