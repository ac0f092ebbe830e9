set(PYCOMM_FLOORS_FILE ${PROJECT_SOURCE_DIR}/csrc/floors.txt)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PYCOMM_FLOORS_FILE})

# pycomm_floor_folders(<kind> <variable>): the folders of csrc/floors.txt that are of this kind, lowest floor first.
function(pycomm_floor_folders kind variable)
  file(STRINGS ${PYCOMM_FLOORS_FILE} lines REGEX "^[0-9]")
  set(folders)
  foreach(line IN LISTS lines)
    if(line MATCHES "^[0-9]+ +([^ ]+) +${kind} *$")
      list(APPEND folders ${CMAKE_MATCH_1})
    endif()
  endforeach()
  set(${variable} ${folders} PARENT_SCOPE)
endfunction()

# pycomm_floor_sources(<kind> <variable>): every .cc file under those folders. The list is looked at again by each
# build, so that a new file needs no edit here.
function(pycomm_floor_sources kind variable)
  pycomm_floor_folders(${kind} folders)
  set(sources)
  foreach(folder IN LISTS folders)
    file(GLOB_RECURSE found CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/csrc/${folder}/*.cc)
    list(APPEND sources ${found})
  endforeach()
  set(${variable} ${sources} PARENT_SCOPE)
endfunction()
