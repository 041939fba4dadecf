//! Protection domains and registered memory.

use std::ffi::c_void;

use super::ibv_context;

/// `alloc` of a parent domain. It gets size, alignment and resource type (such as `MLX5DV_RES_TYPE_QP`).
pub type ibv_parent_domain_alloc = unsafe extern "C" fn(
    pd: *mut ibv_pd,
    context: *mut c_void,
    size: usize,
    alignment: usize,
    resource: u64,
) -> *mut c_void;
/// `free` of a parent domain.
pub type ibv_parent_domain_free =
    unsafe extern "C" fn(pd: *mut ibv_pd, context: *mut c_void, pointer: *mut c_void, resource: u64);

/// `IBV_ALLOCATOR_USE_DEFAULT`: return value of an `alloc` that leaves the buffer to the provider.
pub const IBV_ALLOCATOR_USE_DEFAULT: *mut c_void = usize::MAX as *mut c_void;

mirror! {
    header "infiniband/verbs.h" as MEMORY_LAYOUTS;
    structs {
        ibv_pd {
            context: *mut ibv_context,
            handle: u32,
        }
        ibv_mr {
            context: *mut ibv_context,
            pd: *mut ibv_pd,
            addr: *mut c_void,
            length: usize,
            handle: u32,
            lkey: u32,
            rkey: u32,
        }
        ibv_td { context: *mut ibv_context }
        ibv_td_init_attr { comp_mask: u32 }
        ibv_parent_domain_init_attr {
            pd: *mut ibv_pd,
            td: *mut ibv_td,
            comp_mask: u32,
            alloc: Option<ibv_parent_domain_alloc>,
            free: Option<ibv_parent_domain_free>,
            pd_context: *mut c_void,
        }
    }
    unions {}
    constants {
        u32 {
            IBV_ACCESS_LOCAL_WRITE = 1,
            IBV_ACCESS_REMOTE_WRITE = 1 << 1,
            IBV_ACCESS_REMOTE_READ = 1 << 2,
            IBV_ACCESS_ZERO_BASED = 1 << 5,
            IBV_ACCESS_ON_DEMAND = 1 << 6,
            IBV_ACCESS_HUGETLB = 1 << 7,
            IBV_ACCESS_RELAXED_ORDERING = 1 << 20,
            IBV_ACCESS_OPTIONAL_RANGE = 0x3ff0_0000,
            IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS = 1 << 0,
            IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT = 1 << 1,
        }
    }
}
