//! Programs in C and C++ that use the library, with the shared and the static one, and under valgrind.

#![allow(clippy::unwrap_used)]
#![cfg(target_os = "linux")]

use sdrun_tests::place::Place;
use std::{
    path::{Path, PathBuf},
    process::Command,
};
use tempfile::TempDir;

/// A folder for programs, and where the library is.
struct Workshop {
    dir: TempDir,
    library: PathBuf,
    dist: PathBuf,
}

impl Workshop {
    fn new() -> Self {
        let [library, dist] = [Place::CLibrary, Place::Dist].map(|place| place.find().unwrap());
        Workshop { dir: tempfile::tempdir().unwrap(), library, dist }
    }

    fn source(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("bindings/c").join(name)
    }

    /// Compiles a program with all warnings as errors.
    fn compile(&self, source: &str, options: &[&str]) -> PathBuf {
        let compiler = if source.ends_with("cpp") { "c++" } else { "cc" };
        let program = self.dir.path().join(Path::new(source).file_stem().unwrap());
        let mut command = Command::new(compiler);
        command.args(["-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers", "-g"]);
        command.arg(Self::source(source)).arg("-o").arg(&program);
        command.arg("-I").arg(self.library.join("include")).arg("-L").arg(self.library.join("lib"));
        succeeds(command.args(options));
        program
    }

    /// Links with the shared library.
    fn shared(&self, source: &str) -> PathBuf {
        let lib = self.library.join("lib");
        self.compile(source, &["-lsdrun", &format!("-Wl,-rpath,{}", lib.display()), "-lm"])
    }

    /// Home, data and cache of a program, without runtimes.
    fn environment<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        let home = self.dir.path();
        command
            .env("SDRUN_PROVIDER_FILES", self.dist.join("providers/ggml"))
            .env("SDRUN_DATA_DIR", home.join("data"))
            .env("SDRUN_CACHE_DIR", home.join("cache"))
            .current_dir(home)
    }

    /// `check` with its arguments, and pictures of so many steps.
    fn check<'c>(&self, command: &'c mut Command, program: &Path, steps: usize) -> &'c mut Command {
        let manifest = self.dist.join("providers/ggml/sdrun-provider-ggml.json");
        self.environment(command.arg(program).arg(manifest).arg(self.dir.path()).arg(steps.to_string()))
    }
}

fn succeeds(command: &mut Command) -> String {
    let out = command.output().unwrap_or_else(|why| panic!("{command:?}: {why}"));
    let [text, errors] = [&out.stdout, &out.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert!(out.status.success(), "{command:?} ({}):\n{text}{errors}", out.status);
    text
}

#[test]
fn every_function_does_as_the_header_says() {
    let workshop = Workshop::new();
    let program = workshop.shared("tests/check.c");
    let text = succeeds(workshop.check(&mut Command::new("env"), &program, 3));
    assert_eq!(text, "all as the header says\n");
    let picture =
        sdrun_diffusion::file::decode(&std::fs::read(workshop.dir.path().join("c.png")).unwrap(), 1 << 20)
            .unwrap();
    assert_eq!((picture.image().width(), picture.image().height()), (64, 64));
}

/// The kernels run with what valgrind knows of the processor's instructions; their own tests are elsewhere.
#[test]
#[ignore = "slow: run by `cargo xtask test --all`"]
fn valgrind_finds_no_fault() {
    let workshop = Workshop::new();
    let program = workshop.shared("tests/check.c");
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--quiet", "--error-exitcode=9", "--leak-check=full"]);
    valgrind.args(["--show-leak-kinds=definite", "--errors-for-leak-kinds=definite"]);
    valgrind.arg(format!("--suppressions={}", Workshop::source("tests/valgrind.supp").display()));
    let text = succeeds(workshop.check(&mut valgrind, &program, 1));
    assert_eq!(text, "all as the header says\n");
}

#[test]
fn a_program_in_c_draws() {
    let workshop = Workshop::new();
    let program = workshop.shared("examples/draw.c");
    let mut command = Command::new(program);
    succeeds(workshop.environment(command.args(["a red circle left of a blue square", "picture.png"])));
    let bytes = std::fs::read(workshop.dir.path().join("picture.png")).unwrap();
    let picture = sdrun_diffusion::file::decode(&bytes, 1 << 20).unwrap();
    assert_eq!((picture.image().width(), picture.image().height()), (64, 64));
    // A failure of the library is the program's.
    let mut command = Command::new(workshop.dir.path().join("draw"));
    let out = workshop.environment(command.args(["x", "picture.gif"])).output().unwrap();
    let errors = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.code() == Some(1) && errors.contains("error: picture.gif does not end"), "{errors}");
}

#[test]
fn a_program_in_cpp_runs_a_network_with_the_static_library() {
    let workshop = Workshop::new();
    let description = std::fs::read_to_string(workshop.library.join("lib/pkgconfig/sdrun.pc")).unwrap();
    let private = description.lines().find_map(|line| line.strip_prefix("Libs.private: ")).unwrap();
    let mut options = vec!["-std=c++17", "-l:libsdrun.a"];
    options.extend(private.split(' '));
    let program = workshop.compile("examples/session.cpp", &options);
    let text = succeeds(workshop.environment(&mut Command::new(program)));
    assert!(text.contains("ggml: ") && text.contains("ggml on cpu: 12288 values, the first is "), "{text}");
}
