//! Comparison of every mirrored struct, union and constant with the installed C headers. A C program,
//! generated from the same tables as the Rust types, prints sizes, offsets and values.
//!
//! For other headers set `CPATH=DIRECTORY WIREPATH_TEST_RDMA_VERSION=65`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use rdma_core_sys::{Table, tables};
use wirepath_testlab::{Requirement, require, skip_or_fail};

/// Returns the rdma-core release of the installed headers, according to the library next to them.
fn header_version() -> Result<u32, String> {
    if let Ok(version) = std::env::var("WIREPATH_TEST_RDMA_VERSION") {
        return version.parse().map_err(|_| format!("WIREPATH_TEST_RDMA_VERSION={version} is no release number"));
    }
    let output = Command::new("cc").arg("-print-file-name=libibverbs.so").output().map_err(|e| e.to_string())?;
    let path = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let file = Path::new(&path).canonicalize().map_err(|_| {
        "needs the headers of rdma-core (Debian: libibverbs-dev); scripts/test installs them as root".to_owned()
    })?;
    let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut numbers = name.rsplit('.');
    numbers.nth(1).and_then(|major| major.parse().ok()).ok_or_else(|| format!("{name} has no version"))
}

/// Structs to which C headers appended fields since rdma-core 44, with the version. The libraries get the
/// length of our struct, or access the new fields only if a mask requests them.
const GROWS_AT_END: [(&str, u32); 5] = [
    ("struct ibv_port_attr", 49),
    ("struct ibv_qp_ex", 0),
    ("struct mlx5dv_context", 45),
    ("struct mlx5dv_context_attr", 57),
    ("struct mlx5dv_obj", 63),
];

/// This struct has 16 bytes until rdma-core 60 and 24 bytes since 61. `Mlx5dv::create_flow` lays it out.
const GROWN_IN_61: (&str, u32) = ("struct mlx5dv_flow_action_attr", 61);

/// The only struct that grows at its front. The distances to its last field are compared.
const GROWS_AT_FRONT: &str = "struct verbs_context";

fn c_program(tables: &[&Table], version: u32) -> String {
    let mut program = String::from("#include <stddef.h>\n#include <stdio.h>\n#include <time.h>\n");
    for table in tables {
        writeln!(program, "#include <{}>", table.header).unwrap();
    }
    program.push_str("int main(void)\n{\n");
    for table in tables {
        for layout in table.types.iter().filter(|layout| layout.since <= version) {
            let name = layout.c_name;
            writeln!(program, "printf(\"{name}|%zu|%zu\\n\", sizeof({name}), _Alignof({name}));").unwrap();
            for field in layout.fields.iter().filter(|field| field.since <= version) {
                let member = field.c_name;
                writeln!(
                    program,
                    "printf(\"{name}.{member}|%zu|%zu\\n\", \
                     offsetof({name}, {member}), sizeof((({name} *)0)->{member}));"
                )
                .unwrap();
            }
        }
        for constant in table.constants.iter().filter(|constant| constant.since <= version) {
            let name = constant.name;
            writeln!(program, "printf(\"{name}|%lld\\n\", (long long)({name}));").unwrap();
        }
    }
    program.push_str("return 0;\n}\n");
    program
}

/// Compiles and runs the program. Returns its output: name to numbers.
fn run(program: &str) -> BTreeMap<String, Vec<i64>> {
    let directory = tempfile::tempdir().unwrap();
    let (source, binary) = (directory.path().join("layout.c"), directory.path().join("layout"));
    std::fs::write(&source, program).unwrap();
    // A compiler error is an error of the tables.
    let compiled = Command::new("cc").args(["-std=gnu11", "-o"]).arg(&binary).arg(&source).output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let output = Command::new(&binary).output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| {
            let mut parts = line.split('|');
            let name = parts.next().unwrap().to_owned();
            (name, parts.map(|number| number.parse().unwrap()).collect())
        })
        .collect()
}

/// Returns the number of comparisons, and descriptions of the differences.
fn differences(tables: &[&Table], c: &BTreeMap<String, Vec<i64>>, version: u32) -> (usize, Vec<String>) {
    let mut wrong = Vec::new();
    let mut compared = 0;
    let mut compare = |name: &str, ours: &[i64], theirs: &[i64]| {
        compared += 1;
        if ours != theirs {
            wrong.push(format!("{name}: here {ours:?}, in C {theirs:?}"));
        }
    };
    for table in tables {
        for layout in table.types.iter().filter(|layout| layout.since <= version) {
            let name = layout.c_name;
            let (size, align) = (layout.size as i64, layout.align as i64);
            let theirs = &c[name];
            let stepped = name == GROWN_IN_61.0 && version >= GROWN_IN_61.1;
            let grown = stepped
                || name == GROWS_AT_FRONT
                || GROWS_AT_END.iter().any(|(grown, since)| *grown == name && version >= *since);
            // The front of `verbs_context` grows. The distances from its end must not change.
            let shift = if name == GROWS_AT_FRONT { theirs[0] - size } else { 0 };
            if grown && theirs[0] >= size {
                compare(name, &[align], &theirs[1..]);
            } else {
                compare(name, &[size, align], theirs);
            }
            for field in layout.fields.iter().filter(|field| field.since <= version) {
                // The union of an action grew with the struct.
                if stepped && field.c_name == "qp" {
                    continue;
                }
                let member = format!("{name}.{}", field.c_name);
                compare(&member, &[field.offset as i64 + shift, field.size as i64], &c[&member]);
            }
        }
        for constant in table.constants.iter().filter(|constant| constant.since <= version) {
            compare(constant.name, &[constant.value], &c[constant.name]);
        }
    }
    (compared, wrong)
}

/// Compares the tables with the numbers of C after `disturb` changed them. Returns `None` if the headers are
/// missing.
fn compared(disturb: impl Fn(&mut i64)) -> Option<(u32, usize, Vec<String>)> {
    let version = match header_version() {
        Ok(version) => version,
        Err(why) => {
            skip_or_fail(file!(), line!(), &why);
            return None;
        }
    };
    let all = tables();
    let (installed, absent): (Vec<&Table>, Vec<&Table>) = all.into_iter().partition(|table| table.since <= version);
    for table in absent {
        println!("{}: not installed; its layouts are pinned by assertions in the source", table.header);
    }
    let mut c = run(&c_program(&installed, version));
    for numbers in c.values_mut() {
        disturb(numbers.last_mut().unwrap());
    }
    let (compared, wrong) = differences(&installed, &c, version);
    Some((version, compared, wrong))
}

#[test]
fn every_struct_and_constant_equals_the_c_headers() {
    require!(Requirement::Program("cc"));
    let Some((version, compared, wrong)) = compared(|_| {}) else { return };
    assert!(wrong.is_empty(), "against the headers of rdma-core {version}:\n{}", wrong.join("\n"));
    assert!(compared > 700, "only {compared} comparisons: has a table been lost?");
    println!("{compared} sizes, offsets and values agree with the headers of rdma-core {version}");
}

#[test]
fn every_changed_number_is_detected() {
    require!(Requirement::Program("cc"));
    let Some((_, compared, wrong)) = compared(|number| *number += 1) else { return };
    assert_eq!(wrong.len(), compared, "a wrong number of C went unnoticed");
}
