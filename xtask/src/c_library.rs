//! `cargo xtask c-library`: the library for C and C++, in `target/c-library`:
//!
//! ```text
//! include/sdrun.h
//! lib/libsdrun.so.0, libsdrun.so (a link to it), libsdrun.a
//! lib/pkgconfig/sdrun.pc
//! ```

use crate::{
    dist::Dist,
    workspace::{Workspace, step},
};
use anyhow::{Context, Result};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// What a program needs besides `libsdrun.a` (`rustc --print native-static-libs`).
const STATIC: &str = "-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc";

/// Lays out the library that cargo built beside `dist`. Returns the folder.
pub(crate) fn lay_out(workspace: &Workspace, dist: &Dist) -> Result<PathBuf> {
    step("Laying out the C library");
    let folder = workspace.target.join("c-library");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot delete {}", folder.display()))?;
    }
    let lib = folder.join("lib");
    fs::create_dir_all(lib.join("pkgconfig")).with_context(|| format!("cannot create {}", lib.display()))?;
    fs::create_dir_all(folder.join("include"))?;
    let shared = dist.library("sdrun_c")?;
    copy(&workspace.root.join("include/sdrun.h"), &folder.join("include/sdrun.h"))?;
    copy(shared, &lib.join("libsdrun.so.0"))?;
    copy(&shared.with_extension("a"), &lib.join("libsdrun.a"))?;
    #[cfg(unix)]
    std::os::unix::fs::symlink("libsdrun.so.0", lib.join("libsdrun.so"))?;
    let description = format!(
        "prefix=${{pcfiledir}}/../..\n\nName: sdrun\nDescription: Diffusion models on the compiler that suits the machine\n\
         Version: {}\nCflags: -I${{prefix}}/include\nLibs: -L${{prefix}}/lib -lsdrun\nLibs.private: {STATIC}\n",
        env!("CARGO_PKG_VERSION")
    );
    fs::write(lib.join("pkgconfig/sdrun.pc"), description)?;
    println!("   laid out in {}", folder.display());
    Ok(folder)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to)
        .map(drop)
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}
