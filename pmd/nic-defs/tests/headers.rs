//! Every structure and every number, compared by a C compiler with the headers that are installed.

use std::fmt::Write;
use std::process::Command;

use wirepath_nic_defs::{Constant, Structure, mlx5, netlink, uverbs};
use wirepath_testlab::{Need, require};

fn program(structures: &[Structure], constants: &[Constant]) -> String {
    let mut c = String::from(
        "#include <stddef.h>\n#include <rdma/ib_user_verbs.h>\n#include <rdma/ib_user_ioctl_verbs.h>\n\
         #include <rdma/ib_user_ioctl_cmds.h>\n#include <rdma/rdma_user_ioctl_cmds.h>\n#include <rdma/rdma_netlink.h>\n\
         #include <infiniband/verbs.h>\n#include <infiniband/mlx5dv.h>\n#include <rdma/mlx5-abi.h>\n\
         #include <rdma/mlx5_user_ioctl_cmds.h>\n#include <rdma/mlx5_user_ioctl_verbs.h>\n#if __has_include(<rdma/mana-abi.h>)\n#include <rdma/mana-abi.h>\n#endif\n",
    );
    for structure in structures {
        let name = structure.name;
        // What follows a structure of variable length is not part of it: the end of its last field is its size here.
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
fn every_structure_and_number_is_that_of_the_headers() {
    require!(Need::Program("cc"), Need::File("/usr/include/infiniband/verbs.h"));
    let (structures, constants) = everything();
    assert!(structures.len() > 40 && constants.len() > 150);
    compiles(&program(&structures, &constants)).unwrap();
    // The request number of the ioctl is a macro with a size in it.
    let request = [Constant { name: "RDMA_VERBS_IOCTL", value: uverbs::ioctl::REQUEST }];
    compiles(&program(&[], &request)).unwrap();
}

/// Debian 12's headers are older than MANA's; newer ones have them, and libmana's behaviour under the emulator shows the same.
#[test]
fn mana_where_its_header_is_installed() {
    require!(Need::Program("cc"), Need::File("/usr/include/infiniband/verbs.h"));
    if std::path::Path::new("/usr/include/rdma/mana-abi.h").exists() {
        compiles(&program(uverbs::mana::STRUCTURES, &[])).unwrap();
    }
    let size = |name| uverbs::mana::STRUCTURES.iter().find(|s| s.name == name).unwrap().size;
    assert_eq!((size("struct mana_ib_create_qp_rss"), size("struct mana_ib_create_qp_rss_resp")), (64, 520));
}

#[test]
fn a_wrong_field_is_found() {
    require!(Need::Program("cc"), Need::File("/usr/include/infiniband/verbs.h"));
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
