set(PYCOMM_LAYERS_FILE ${PROJECT_SOURCE_DIR}/csrc/layers.txt)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PYCOMM_LAYERS_FILE})

# pycomm_layer_folders(<kind> <variable>): the folders of csrc/layers.txt that are of this kind, lowest layer first.
function(pycomm_layer_folders kind variable)
  file(STRINGS ${PYCOMM_LAYERS_FILE} lines REGEX "^[0-9]")
  set(folders)
  foreach(line IN LISTS lines)
    if(line MATCHES "^[0-9]+ +([^ ]+) +${kind} *$")
      list(APPEND folders ${CMAKE_MATCH_1})
    endif()
  endforeach()
  set(${variable} ${folders} PARENT_SCOPE)
endfunction()

# pycomm_unite(<name> <file>...): compiles these files in as few units of about equal size as have PYCOMM_UNIT_NBYTES each.
# A unit reads a header once for all of its files. kernels_*.cc stay alone: there is one for each instruction set, and they
# give the same names to different vectors.
function(pycomm_unite name)
  list(FILTER ARGN EXCLUDE REGEX "/kernels_[^/]*$")
  set(total 0)
  foreach(file IN LISTS ARGN)
    file(SIZE ${file} nbytes)
    math(EXPR total "${total} + ${nbytes}")
  endforeach()
  math(EXPR units "(${total} + ${PYCOMM_UNIT_NBYTES} - 1) / ${PYCOMM_UNIT_NBYTES}")
  set(before 0)
  foreach(file IN LISTS ARGN)
    file(SIZE ${file} nbytes)
    math(EXPR unit "(${before} + ${nbytes} / 2) * ${units} / ${total}")
    set_source_files_properties(${file} PROPERTIES UNITY_GROUP ${name}${unit})
    math(EXPR before "${before} + ${nbytes}")
  endforeach()
endfunction()

# pycomm_layer_sources(<kind> <variable>): every .cc file under those folders. The list is looked at again by each
# build, so that a new file needs no edit here. Each file is told which unit of its folder it is compiled in.
function(pycomm_layer_sources kind variable)
  pycomm_layer_folders(${kind} folders)
  set(sources)
  foreach(folder IN LISTS folders)
    file(GLOB_RECURSE found CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/csrc/${folder}/*.cc)
    pycomm_unite("${folder}" ${found})
    list(APPEND sources ${found})
  endforeach()
  set(${variable} ${sources} PARENT_SCOPE)
endfunction()
