//! What `verbs.h` defines inline: functions that no library exports. They reach the provider through the operations in the context.
//!
//! Each does what its C twin does, return value and `errno` included. All are unsafe as the C functions are: pointers must be live
//! objects of one context, and an object must not be used once it is destroyed.

use std::ffi::c_int;
use std::mem::offset_of;

use libc::{EINVAL, ENOSYS, EOPNOTSUPP};

use super::*;

/// Value of `abi_compat` in every context that has a `verbs_context` around it: `__VERBS_ABI_IS_EXTENDED`.
const ABI_IS_EXTENDED: usize = usize::MAX;

/// Distances, because a library's `verbs_context` may be longer at the front than ours (or shorter).
const SIZE_BEFORE_CONTEXT: usize = offset_of!(verbs_context, context) - offset_of!(verbs_context, sz);
const CONTEXT_AND_AFTER: usize = size_of::<verbs_context>() - offset_of!(verbs_context, context);

/// `verbs_get_ctx_op`: the operation that lies `before` bytes before the context, unless the library has none.
///
/// # Safety
/// `context` is an open context, and an `Option` of a function lies `before` bytes before it in `struct verbs_context`.
#[inline]
unsafe fn operation<F: Copy>(context: *mut ibv_context, before: usize) -> Option<F> {
    // SAFETY: abi_compat says that the context is the last field of a verbs_context, sz how much of it lies in memory.
    unsafe {
        if (*context).abi_compat as usize != ABI_IS_EXTENDED {
            return None;
        }
        let size = context.byte_sub(SIZE_BEFORE_CONTEXT).cast::<usize>().read();
        if size < before + CONTEXT_AND_AFTER {
            return None;
        }
        context.byte_sub(before).cast::<Option<F>>().read()
    }
}

macro_rules! operation {
    ($context:expr, $name:ident) => {
        operation_of($context, offset_of!(verbs_context, context) - offset_of!(verbs_context, $name), |table| {
            table.$name
        })
    };
}

/// [`operation`] with its type taken from the field.
///
/// # Safety
/// As for [`operation`]; `field` names the field that lies `before` bytes before the context.
#[inline]
unsafe fn operation_of<F: Copy>(
    context: *mut ibv_context,
    before: usize,
    field: fn(&verbs_context) -> Option<F>,
) -> Option<F> {
    let _ = field;
    // SAFETY: forwarded.
    unsafe { operation(context, before) }
}

fn set_errno(value: c_int) {
    // SAFETY: the address of this thread's errno.
    unsafe { *libc::__errno_location() = value };
}

/// A null pointer with `errno` telling that the provider lacks the operation.
fn not_supported<T>() -> *mut T {
    set_errno(EOPNOTSUPP);
    std::ptr::null_mut()
}

/// Functions that only forward to one operation; without it they return a null pointer and `EOPNOTSUPP` in `errno`, or `EOPNOTSUPP`.
macro_rules! forwarded {
    ($($(#[$meta:meta])* $kind:ident $function:ident($first:ident: $first_type:ty $(, $argument:ident: $type:ty)*) -> $result:ty
        = $context:expr => $operation:ident;)*) => {$(
        $(#[$meta])*
        /// # Safety
        /// As the C function of this name: live objects of one context.
        #[inline]
        pub unsafe fn $function($first: $first_type $(, $argument: $type)*) -> $result {
            // SAFETY: the caller's contract.
            unsafe {
                match operation!($context, $operation) {
                    Some(function) => function($first $(, $argument)*),
                    None => forwarded!(@$kind),
                }
            }
        }
    )*};
    (@object) => { not_supported() };
    (@status) => { EOPNOTSUPP };
}

forwarded! {
    object ibv_create_flow(qp: *mut ibv_qp, flow: *mut ibv_flow_attr) -> *mut ibv_flow = (*qp).context => ibv_create_flow;
    status ibv_destroy_flow(flow: *mut ibv_flow) -> c_int = (*flow).context => ibv_destroy_flow;
    object ibv_create_flow_action_esp(context: *mut ibv_context, attr: *mut ibv_flow_action_esp_attr) -> *mut ibv_flow_action
        = context => create_flow_action_esp;
    status ibv_destroy_flow_action(action: *mut ibv_flow_action) -> c_int = (*action).context => destroy_flow_action;
    object ibv_create_counters(context: *mut ibv_context, attr: *mut ibv_counters_init_attr) -> *mut ibv_counters
        = context => create_counters;
    status ibv_destroy_counters(counters: *mut ibv_counters) -> c_int = (*counters).context => destroy_counters;
    status ibv_attach_counters_point_flow(counters: *mut ibv_counters, attr: *mut ibv_counter_attach_attr, flow: *mut ibv_flow) -> c_int
        = (*counters).context => attach_counters_point_flow;
    status ibv_read_counters(counters: *mut ibv_counters, values: *mut u64, count: u32, flags: u32) -> c_int
        = (*counters).context => read_counters;
    object ibv_alloc_td(context: *mut ibv_context, attr: *mut ibv_td_init_attr) -> *mut ibv_td = context => alloc_td;
    status ibv_dealloc_td(td: *mut ibv_td) -> c_int = (*td).context => dealloc_td;
    object ibv_alloc_parent_domain(context: *mut ibv_context, attr: *mut ibv_parent_domain_init_attr) -> *mut ibv_pd
        = context => alloc_parent_domain;
    status ibv_query_rt_values_ex(context: *mut ibv_context, values: *mut ibv_values_ex) -> c_int = context => query_rt_values;
    object ibv_create_cq_ex(context: *mut ibv_context, attr: *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex = context => create_cq_ex;
    status ibv_modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int = (*cq).context => modify_cq;
    status ibv_modify_wq(wq: *mut ibv_wq, attr: *mut ibv_wq_attr) -> c_int = (*wq).context => modify_wq;
    status ibv_destroy_wq(wq: *mut ibv_wq) -> c_int = (*wq).context => destroy_wq;
    object ibv_create_rwq_ind_table(context: *mut ibv_context, attr: *mut ibv_rwq_ind_table_init_attr) -> *mut ibv_rwq_ind_table
        = context => create_rwq_ind_table;
    status ibv_destroy_rwq_ind_table(table: *mut ibv_rwq_ind_table) -> c_int = (*table).context => destroy_rwq_ind_table;
    /// Only with more than `IBV_QP_INIT_ATTR_PD` in `comp_mask`; `ibv_create_qp` makes the plain ones.
    object ibv_create_qp_ex(context: *mut ibv_context, attr: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp = context => create_qp_ex;
}

/// Creates a work queue and makes ready the parts of it that libibverbs keeps (the inline function does, not the provider).
///
/// # Safety
/// As the C function of this name.
pub unsafe fn ibv_create_wq(context: *mut ibv_context, attr: *mut ibv_wq_init_attr) -> *mut ibv_wq {
    // SAFETY: the caller's contract; a queue that was just created is nobody else's.
    unsafe {
        let Some(create) = operation!(context, create_wq) else { return not_supported() };
        let wq = create(context, attr);
        if !wq.is_null() {
            (*wq).wq_context = (*attr).wq_context;
            (*wq).events_completed = 0;
            libc::pthread_mutex_init(&raw mut (*wq).mutex, std::ptr::null());
            libc::pthread_cond_init(&raw mut (*wq).cond, std::ptr::null());
        }
        wq
    }
}

/// Attributes of the device; `None`: the provider has only `ibv_query_device`, whose answer belongs in `orig_attr` then.
///
/// # Safety
/// As the C function of this name; `attr` may be written.
pub unsafe fn ibv_query_device_ex(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
) -> Option<c_int> {
    // SAFETY: the caller's contract.
    unsafe {
        if !input.is_null() && (*input).comp_mask != 0 {
            return Some(EINVAL);
        }
        let query = operation!(context, query_device_ex)?;
        match query(context, input, attr, size_of::<ibv_device_attr_ex>()) {
            EOPNOTSUPP | ENOSYS => None,
            result => Some(result),
        }
    }
}

/// Attributes of a port: what the macro `ibv_query_port` does. The exported symbol of that name fills only the first 44 bytes: `None`
/// sends the caller there, with `attr` zeroed.
///
/// # Safety
/// As the C function of this name; `attr` may be written.
pub unsafe fn ibv_query_port_ex(context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> Option<c_int> {
    // SAFETY: the caller's contract.
    unsafe {
        attr.write(ibv_port_attr::zeroed());
        let query = operation!(context, query_port)?;
        Some(query(context, port, attr, size_of::<ibv_port_attr>()))
    }
}

/// Takes up to `entries` completions; their number, or negative on failure.
///
/// # Safety
/// As the C function of this name: `wc` has room for `entries`.
#[inline]
pub unsafe fn ibv_poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the caller's contract; every context has this operation, the default one fails.
    unsafe { (*(*cq).context).ops.poll_cq.map_or(-EOPNOTSUPP, |poll| poll(cq, entries, wc)) }
}

/// Asks for an event at the next completion.
///
/// # Safety
/// As the C function of this name.
#[inline]
pub unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { (*(*cq).context).ops.req_notify_cq.map_or(EOPNOTSUPP, |request| request(cq, solicited_only)) }
}

/// Posts send requests.
///
/// # Safety
/// As the C function of this name: a chain of requests whose buffers stay registered until they complete.
#[inline]
pub unsafe fn ibv_post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { (*(*qp).context).ops.post_send.map_or(EOPNOTSUPP, |post| post(qp, wr, bad)) }
}

/// Posts receive requests to a queue pair.
///
/// # Safety
/// As the C function of this name.
#[inline]
pub unsafe fn ibv_post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { (*(*qp).context).ops.post_recv.map_or(EOPNOTSUPP, |post| post(qp, wr, bad)) }
}

/// Posts receive requests to a work queue.
///
/// # Safety
/// As the C function of this name.
#[inline]
pub unsafe fn ibv_post_wq_recv(wq: *mut ibv_wq, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { (*wq).post_recv.map_or(EOPNOTSUPP, |post| post(wq, wr, bad)) }
}

/// Addresses of operations that only providers implement: they tell whose context it is.
///
/// # Safety
/// `context` is an open context.
pub unsafe fn provider_operations(context: *mut ibv_context) -> impl Iterator<Item = *const ()> {
    // SAFETY: the caller's contract.
    let operations = unsafe {
        [
            operation!(context, create_wq).map(|function| function as *const ()),
            operation!(context, alloc_parent_domain).map(|function| function as *const ()),
            operation!(context, create_qp_ex).map(|function| function as *const ()),
            operation!(context, query_device_ex).map(|function| function as *const ()),
            (*context).ops.poll_cq.map(|function| function as *const ()),
        ]
    };
    operations.into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn no_flow(_: *mut ibv_flow) -> c_int {
        7
    }

    unsafe extern "C" fn long_answer(_: *mut ibv_context, _: u8, _: *mut ibv_port_attr, size: usize) -> c_int {
        size as c_int
    }

    /// What libibverbs allocates; newer ones have more before it.
    fn table() -> Box<verbs_context> {
        let mut table = Box::new(verbs_context::zeroed());
        table.sz = size_of::<verbs_context>();
        table.context.abi_compat = ABI_IS_EXTENDED as *mut _;
        table
    }

    #[test]
    fn an_operation_is_found_before_the_context() {
        let mut table = table();
        table.ibv_destroy_flow = Some(no_flow);
        table.query_port = Some(long_answer);
        let context = &raw mut table.context;
        let mut flow = ibv_flow::zeroed();
        flow.context = context;
        let mut port = ibv_port_attr::zeroed();
        // SAFETY: a table as libibverbs builds it.
        unsafe {
            assert_eq!(ibv_destroy_flow(&raw mut flow), 7);
            assert_eq!(ibv_query_port_ex(context, 1, &raw mut port), Some(size_of::<ibv_port_attr>() as c_int));
            assert_eq!(provider_operations(context).count(), 0);
        }
    }

    #[test]
    fn an_operation_that_the_library_is_too_old_for_is_not_read() {
        let mut table = table();
        table.query_port = Some(long_answer);
        table.ibv_destroy_flow = Some(no_flow);
        // As if the library's table began right behind `query_port`.
        table.sz = size_of::<verbs_context>() - size_of::<usize>();
        let context = &raw mut table.context;
        let mut flow = ibv_flow::zeroed();
        flow.context = context;
        let mut port = ibv_port_attr::zeroed();
        // SAFETY: a table as libibverbs builds it.
        unsafe {
            assert_eq!(ibv_query_port_ex(context, 1, &raw mut port), None);
            assert_eq!(ibv_destroy_flow(&raw mut flow), 7);
            table.context.abi_compat = std::ptr::null_mut();
            assert_eq!(ibv_destroy_flow(&raw mut flow), EOPNOTSUPP);
        }
    }

    #[test]
    fn a_missing_operation_sets_errno_as_c_does() {
        let mut table = table();
        let context = &raw mut table.context;
        set_errno(0);
        let mut wanted = ibv_wq_init_attr::zeroed();
        // SAFETY: a table as libibverbs builds it.
        unsafe {
            assert!(ibv_create_wq(context, &raw mut wanted).is_null());
            assert_eq!(*libc::__errno_location(), EOPNOTSUPP);
            let mut input = ibv_query_device_ex_input::zeroed();
            let mut attr = ibv_device_attr_ex::zeroed();
            assert_eq!(ibv_query_device_ex(context, &raw const input, &raw mut attr), None);
            input.comp_mask = 1;
            assert_eq!(ibv_query_device_ex(context, &raw const input, &raw mut attr), Some(EINVAL));
        }
    }
}
