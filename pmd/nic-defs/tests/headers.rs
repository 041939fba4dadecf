//! Compares every structure and every constant with the installed C headers, by means of a C compiler.

use std::fmt::Write;
use std::process::Command;

use wirepath_nic_defs::{Constant, Structure, mlx5, netlink, uverbs};
use wirepath_testlab::{Requirement, require};

fn program(structures: &[Structure], constants: &[Constant]) -> String {
    let mut c = String::from(
        "#include <stddef.h>\n#include <rdma/ib_user_verbs.h>\n#include <rdma/ib_user_ioctl_verbs.h>\n\
         #include <rdma/ib_user_ioctl_cmds.h>\n#include <rdma/rdma_user_ioctl_cmds.h>\n#include <rdma/rdma_netlink.h>\n\
         #include <infiniband/verbs.h>\n#include <infiniband/mlx5dv.h>\n#include <rdma/mlx5-abi.h>\n\
         #include <rdma/mlx5_user_ioctl_cmds.h>\n#include <rdma/mlx5_user_ioctl_verbs.h>\n\
         #if __has_include(<rdma/mana-abi.h>)\n#include <rdma/mana-abi.h>\n#endif\n",
    );
    for structure in structures {
        let name = structure.name;
        // A flexible array member is not part of `sizeof`, and the table does not contain it.
        writeln!(c, "_Static_assert(sizeof({name}) == {}, \"size of {name}\");", structure.size).unwrap();
        for field in structure.fields {
            let (field, offset, size) = (field.name, field.offset, field.size);
            writeln!(c, "_Static_assert(offsetof({name}, {field}) == {offset}, \"{name}.{field} at {offset}\");")
                .unwrap();
            writeln!(c, "_Static_assert(sizeof((({name} *)0)->{field}) == {size}, \"{name}.{field}: {size}\");")
                .unwrap();
        }
    }
    for constant in constants {
        writeln!(c, "_Static_assert({} == {}ull, \"{0}\");", constant.name, constant.value).unwrap();
    }
    c
}

fn compiles(source: &str) -> Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("check.c");
    std::fs::write(&file, source).unwrap();
    let output =
        Command::new("cc").args(["-std=gnu11", "-fsyntax-only", "-Wno-sign-compare"]).arg(&file).output().unwrap();
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

fn everything() -> (Vec<Structure>, Vec<Constant>) {
    let structures = [
        uverbs::write::STRUCTURES,
        uverbs::ioctl::STRUCTURES,
        uverbs::mlx5::STRUCTURES,
        mlx5::WQE_STRUCTURES,
        mlx5::CQE_STRUCTURES,
    ]
    .concat();
    let constants = [
        uverbs::CONSTANTS,
        uverbs::EVENT_CONSTANTS,
        uverbs::FLOW_CONSTANTS,
        uverbs::write::CONSTANTS,
        uverbs::ioctl::CONSTANTS,
        netlink::CONSTANTS,
        uverbs::mlx5::CONSTANTS,
        mlx5::WQE_CONSTANTS,
        mlx5::CQE_CONSTANTS,
        mlx5::DOORBELL_CONSTANTS,
    ]
    .concat();
    (structures, constants)
}

#[test]
fn layouts_and_constants_match_c_headers() {
    require!(Requirement::Program("cc"), Requirement::File("/usr/include/infiniband/verbs.h"));
    let (structures, constants) = everything();
    assert!(structures.len() > 40 && constants.len() > 150);
    compiles(&program(&structures, &constants)).unwrap();
    // The ioctl request number is a macro that contains a size.
    let request = [Constant { name: "RDMA_VERBS_IOCTL", value: uverbs::ioctl::REQUEST }];
    compiles(&program(&[], &request)).unwrap();
}

/// The headers of Debian 12 do not contain the MANA ABI; newer headers do. libmana under the emulator exercises the
/// same layouts.
#[test]
fn mana_layouts_match_the_header_if_installed() {
    require!(Requirement::Program("cc"), Requirement::File("/usr/include/infiniband/verbs.h"));
    if std::path::Path::new("/usr/include/rdma/mana-abi.h").exists() {
        compiles(&program(uverbs::mana::STRUCTURES, &[])).unwrap();
    }
    let size = |name| uverbs::mana::STRUCTURES.iter().find(|s| s.name == name).unwrap().size;
    assert_eq!((size("struct mana_ib_create_qp_rss"), size("struct mana_ib_create_qp_rss_resp")), (64, 520));
}

#[test]
fn wrong_layout_fails_to_compile() {
    require!(Requirement::Program("cc"), Requirement::File("/usr/include/infiniband/verbs.h"));
    let (mut structures, mut constants) = everything();
    let mut wrong = structures[2];
    let mut fields = wrong.fields.to_vec();
    fields[1].offset += 4;
    wrong.fields = fields.leak();
    structures[2] = wrong;
    let message = compiles(&program(&structures, &[])).unwrap_err();
    assert!(message.contains("struct ib_uverbs_async_event_desc.event_type at 12"), "{message}");
    constants[0].value += 1;
    assert!(compiles(&program(&[], &constants)).unwrap_err().contains(constants[0].name));
}
